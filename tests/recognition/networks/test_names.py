"""Names, options and parameters of the networks, without running them."""

import re

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition import networks
from dsoftmax.recognition.networks import iresnet

SQUEEZE_EXCITATION = ("conv1_weight", "conv1_bias", "relu1_gamma", "conv2_weight", "conv2_bias")


def shapes_of(network, image_size=(112, 112)):
    """Return the shape of each parameter by name, those of moving averages as well."""
    symbol = network(mx.sym.var("data"))
    arguments, _, auxiliary = symbol.infer_shape(data=(1, 3, *image_size))
    shapes = dict(zip(symbol.list_arguments(), arguments))
    del shapes["data"]
    return {**shapes, **dict(zip(symbol.list_auxiliary_states(), auxiliary))}


def count(network):
    statistics = ("moving_mean", "moving_var")
    return sum(
        np.prod(shape)
        for name, shape in shapes_of(network).items()
        if not name.endswith(statistics)
    )


def units_of(parameter_names):
    found = (re.match(r"stage(\d)_unit\d+_", name) for name in parameter_names)
    units = {(match.group(1), match.group(0)) for match in found if match}
    return tuple(sum(stage == str(number) for stage, _ in units) for number in range(1, 5))


def bn(name):
    return {f"{name}_{part}" for part in ("gamma", "beta", "moving_mean", "moving_var")}


@pytest.mark.parametrize("depth", iresnet.UNITS_PER_STAGE)
def test_residual_networks_have_the_units_of_the_table(depth):
    # The table counts layers: two convolutions a unit, the stem's and the dense layer.
    named_by_layers = {18, 34, 50, 100, 134, 140, 160}
    network = networks.create(f"r{depth}")
    units = units_of(network.collect_params())
    assert units == iresnet.UNITS_PER_STAGE[depth]
    if depth in named_by_layers:
        assert 2 * sum(units) + 2 == depth


def test_names_and_shapes_of_r50():
    shapes = shapes_of(networks.create("r50"))
    expected = {
        "conv0_weight": (64, 3, 3, 3),
        "bn0_gamma": (64,),
        "bn0_beta": (64,),
        "bn0_moving_mean": (64,),
        "bn0_moving_var": (64,),
        "relu0_gamma": (64,),
        "stage1_unit1_bn1_gamma": (64,),
        "stage2_unit1_conv1_weight": (128, 64, 3, 3),
        "stage2_unit1_bn2_moving_var": (128,),
        "stage2_unit1_relu1_gamma": (128,),
        "stage2_unit1_conv2_weight": (128, 128, 3, 3),
        "stage2_unit1_bn3_beta": (128,),
        "stage2_unit1_conv1sc_weight": (128, 64, 1, 1),
        "stage2_unit1_sc_gamma": (128,),
        "stage3_unit14_conv2_weight": (256, 256, 3, 3),
        "bn1_gamma": (512,),
        "pre_fc1_weight": (512, 512 * 7 * 7),
        "pre_fc1_bias": (512,),
        "fc1_gamma": (512,),
        "fc1_moving_mean": (512,),
    }
    assert {name: shapes.get(name) for name in expected} == expected


def test_all_names_of_r18():
    unit = {"conv1_weight", "conv2_weight", "relu1_gamma"}.union(*map(bn, ("bn1", "bn2", "bn3")))
    shortcut = {"conv1sc_weight"} | bn("sc")
    expected = {"conv0_weight", "relu0_gamma", "pre_fc1_weight", "pre_fc1_bias"}.union(
        *map(bn, ("bn0", "bn1", "fc1"))
    )
    for stage in (1, 2, 3, 4):
        expected |= {f"stage{stage}_unit1_{name}" for name in unit | shortcut}
        expected |= {f"stage{stage}_unit2_{name}" for name in unit}
    assert set(networks.create("r18").collect_params()) == expected


@pytest.mark.parametrize(
    ("options", "more", "fewer"),
    [
        (
            {"se": 1},
            {f"stage1_unit1_se_{name}" for name in SQUEEZE_EXCITATION},
            set(),
        ),
        ({"act": "relu"}, set(), {"relu0_gamma", "stage1_unit1_relu1_gamma"}),
        ({"unit": 1}, {"stage1_unit1_relu3_gamma"}, bn("stage1_unit1_bn3")),
        (
            {"unit": 2},
            {"stage1_unit1_sc_weight", "stage1_unit1_relu2_gamma"},
            bn("stage1_unit1_bn3") | bn("stage1_unit1_sc") | {"stage1_unit1_conv1sc_weight"},
        ),
        ({"input": 2}, bn("bn_data"), set()),
    ],
)
def test_options_change_the_names(options, more, fewer):
    plain = set(networks.create("r18").collect_params())
    changed = set(networks.create("r18", **options).collect_params())
    in_first_unit = re.compile("stage[^1]|stage1_unit2")
    assert {name for name in changed - plain if not in_first_unit.match(name)} == more
    assert {name for name in plain - changed if not in_first_unit.match(name)} == fewer


def test_squeeze_and_excitation_of_vargfacenet():
    plain, weighted = (set(networks.create("vargfacenet", se=se).collect_params()) for se in (0, 1))
    assert plain < weighted
    more = weighted - plain
    assert len(more) == 5 * (1 + 2 + 6 + 3)  # the head, and all units but the first of a stage
    parts = ("conv1_weight", "conv1_bias", "act1_gamma", "conv2_weight", "conv2_bias")
    assert {f"vargface_stage_2_unit_2_se_{part}" for part in parts} < more


def test_the_stem_and_the_multiplier():
    assert shapes_of(networks.create("r18", input=0))["conv0_weight"] == (64, 3, 7, 7)
    shapes = shapes_of(networks.create("r18", multiplier=0.25))
    assert shapes["conv0_weight"] == (16, 3, 3, 3)
    assert shapes["stage4_unit2_conv2_weight"] == (128, 128, 3, 3)


@pytest.mark.parametrize(
    ("name", "millions"), [("r100", 65.2), ("r100fc", 65.2), ("y1", 1.0), ("y2", 2.0)]
)
def test_numbers_of_parameters(name, millions):
    assert count(networks.create(name)) == pytest.approx(millions * 1e6, rel=0.01)


def test_multipliers_that_leave_no_network_are_refused():
    with pytest.raises(ValueError, match=r"multiplier 0\.05 leaves less than one of 16 channels"):
        networks.create("mnas", multiplier=0.05)
    with pytest.raises(ValueError, match=r"multiplier 1\.1 .*35, 70, 140, 281 .* multiples of 8"):
        networks.create("vargfacenet", multiplier=1.1)


def test_gammas_of_last_norm_are_fixed_and_statistics_not_learnt():
    parameters = networks.create("r18").collect_params()
    fixed = {name for name, parameter in parameters.items() if parameter.grad_req == "null"}
    assert "fc1_gamma" in fixed
    assert all(name.endswith(("moving_mean", "moving_var")) for name in fixed - {"fc1_gamma"})


def test_two_networks_of_a_process_have_the_same_names():
    for name in ("r18", "y1", "mnas05", "d121", "tiny", "gluoncv:mobilenet0.25"):
        first, second = networks.create(name), networks.create(name)
        assert list(first.collect_params()) == list(second.collect_params())
        assert first.name == second.name == name


def test_embedding_sizes():
    expected = {
        **{"r50v1": 512, "y1": 128, "y2": 256, "tiny": 128, "m1": 256, "m05": 256, "mnas": 256},
        **{"mnas05": 256, "mnas025": 256, "d169": 512, "d201": 512, "vargfacenet": 512},
    }
    assert {name: networks.create(name).embedding_size for name in expected} == expected
    assert networks.create("y1", 64).embedding_size == 64
    with pytest.raises(ValueError, match="embedding_size must be a whole number"):
        networks.create("y1", 0)


def test_unknown_names_are_answered_by_near_ones():
    with pytest.raises(ValueError, match=r"'r1000', did you mean r100 .*Legal are .*y1.*gluoncv:"):
        networks.create("r1000")
    with pytest.raises(ValueError, match=r"resnet18_v9.*did you mean resnet18_v"):
        networks.create("gluoncv:resnet18_v9")


def test_unknown_options_are_answered_by_legal_ones():
    with pytest.raises(TypeError, match="y1 has no option se, unit; legal are act, blocks"):
        networks.create("y1", se=1, unit=3)
    for option, value, legal in (
        ("act", "gelu", "prelu, relu"),
        ("unit", 4, "1, 2, 3"),
        ("input", 3, "0, 1, 2"),
        ("output", "X", "E, F, G"),
        ("units_per_stage", (1, 2), "4 numbers"),
    ):
        with pytest.raises(ValueError, match=f"{option} must be .*{legal}"):
            networks.create("r18", **{option: value})


def test_options_default_to_those_of_the_table():
    assert set(networks.names()) == set(networks.NETWORKS)
    for name in ("r34", "r100fc", "y2", "tiny"):
        options = dict(networks.NETWORKS[name])
        assert shapes_of(networks.create(name, **options)) == shapes_of(networks.create(name))


def test_initializers_are_those_of_insightface():
    def settings(name):
        made = networks.initializer(name)
        return made.rnd_type, made.factor_type, made.magnitude

    assert settings("r50") == settings("y1") == ("gaussian", "out", 2.0)
    for name in ("tiny", "m1", "mnas05", "d169", "vargfacenet", "gluoncv:resnet18_v1"):
        assert settings(name) == ("uniform", "in", 2.0)
    network = networks.create("tiny", act="prelu")
    network.initialize(networks.initializer("tiny"))
    network(mx.nd.zeros((1, 3, 28, 28)))
    for name, parameter in network.collect_params().items():
        if name.endswith("relu_gamma"):
            assert (parameter.data().asnumpy() == 0.25).all()
        elif name.endswith("bn_gamma"):
            assert (parameter.data().asnumpy() == 1).all()
