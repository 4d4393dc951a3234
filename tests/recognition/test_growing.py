"""Runs whose classes are changed between two steps, and go on."""

import csv
import json
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from dsoftmax import losses
from dsoftmax.recognition import checkpoint, growing, states, train
from dsoftmax.recognition.common.arrays import map_arrays
from dsoftmax.recognition.data.identities import write_table
from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.settings import parse
from dsoftmax.recognition.trained import Trained
from tests.recognition.runs import COUNTS, assert_same_state, folder_of, newest, stop_after

CLASSES = len(COUNTS)


@pytest.fixture
def trained(flags):
    """Return a function that trains for seven steps and returns the flags and the folder."""

    def train_some(name="first", **changes):
        made = flags(name, **{"target": "none", **changes})
        stop_after(7, made)
        return made, str(folder_of(made))

    return train_some


def arrays_of(state):
    """Return class weights and momenta of a state, by numpy and MXNet alone."""
    saved = mx.nd.load(str(Path(state) / "head.states"))
    momenta = {name: saved[name].asnumpy() for name in saved if name.startswith("state")}
    return {"weight": np.load(Path(state) / "classes.npy"), **momenta}


class TestRoundTrips:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"mom": 0},
            {"devices": "cpu:2", "per_batch_size": 4, "class_parallel": 1},
            {"loss": "dsoftmax_k", "sample_rate": 0.4, "store": "host"},
            {"loss": "dsoftmax_k", "sample_rate": 0.4, "store": "host", "class_dtype": "float16"},
            {"loss": "adaface"},
        ],
        ids=["plain", "without momenta", "two devices", "host store", "float16", "adaface"],
    )
    def test_exported_and_imported_it_goes_on_to_the_same_bits(
        self, flags, trained, tmp_path, changes
    ):
        whole = flags("whole", target="none", **changes)
        assert train.main(whole) == 0
        _, folder = trained(**changes)
        weights, momenta = str(tmp_path / "classes.npy"), str(tmp_path / "momenta.npy")
        has_momenta = changes.get("mom") != 0
        growing.export(folder, weights, momenta if has_momenta else None)
        second = flags("second", target="none", **changes)
        output = str(folder_of(second))
        growing.replace(folder, weights, output, momenta if has_momenta else None)
        assert_same_state(newest(second), states_path(folder))
        assert train.main([*second, "--resume"]) == 0
        assert_same_state(newest(whole), newest(second))

    def test_added_and_dropped_nothing_has_changed(self, trained, dataset, tmp_path):
        _, folder = trained()
        more, _ = dataset((*COUNTS, 3, 2), name="more")
        added = growing.add(folder, str(more), str(tmp_path / "added"))
        assert added.shape == (CLASSES + 2, 8)
        dropped = growing.drop(added.path, np.array([5, 6]), str(tmp_path / "dropped"))
        assert_same_state(Path(dropped.path), states_path(folder))
        assert states.check_state(dropped.path).is_sound

    def test_split_and_joined_nothing_has_changed(self, trained, tmp_path):
        _, folder = trained()
        first = growing.drop(folder, np.array([3, 4]), str(tmp_path / "first"))
        second = growing.drop(folder, np.array([0, 1, 2]), str(tmp_path / "second"))
        joined = growing.join_heads(first.path, second.path, str(tmp_path / "joined"))
        assert_same_state(Path(joined.path), states_path(folder))


def states_path(folder):
    return Path(states.list_states(str(Path(folder) / "states"))[0])


def test_what_else_a_state_holds(trained, tmp_path):
    _, folder = trained(loss="adaface", target="val")
    made = growing.drop(folder, np.array([1]), str(tmp_path / "out"))
    old, new = (states.read_facts(str(path)) for path in (states_path(folder), made.path))
    assert new["step"] == 7
    assert (old["epoch"], old["images_seen"]) == (1, 16)
    assert (new["epoch"], new["images_seen"]) == (2, 0)  # of other data
    assert new["num_classes"] == CLASSES - 1
    assert new["settings"] == old["settings"]
    assert old["best"]
    assert "best" not in new  # its model is in another folder
    old, new = (
        json.loads(map_arrays(Path(path) / "head.states")["facts"].tobytes())
        for path in (states_path(folder), made.path)
    )
    assert new == old
    assert set(new["criterion"]) == {"mean", "deviation"}
    with open(tmp_path / "out" / "labels.csv") as file:
        assert list(csv.reader(file)) == [
            ["old_label", "label"],
            *([old, new] for old, new in zip("0234", "0123")),
        ]
    for name in states.FILES[:2]:
        same = [(Path(path) / name).read_bytes() for path in (states_path(folder), made.path)]
        assert same[0] == same[1]


def test_it_goes_on_after_each_change(flags, trained, dataset, jpeg, tmp_path):
    """With as many classes as the new dataset has, on two devices too."""
    _, folder = trained()
    kept = {"target": "none", "max_steps": 9}
    more, _ = dataset((*COUNTS, 4), name="more")
    made = flags("added", data_dir=more, devices="cpu:2", per_batch_size=4, **kept)
    growing.add(folder, str(more), str(folder_of(made)))
    assert train.main([*made, "--resume"]) == 0
    fewer, _ = dataset(COUNTS[:-1], name="fewer")
    made = flags("merged", data_dir=fewer, **kept)
    growing.merge(folder, np.array([1, 3]), str(folder_of(made)), np.array([8, 7]))
    assert train.main([*made, "--resume"]) == 0
    assert newest(made).name == "state-00000009"


def test_a_forest_is_grown_anew(flags, trained, dataset):
    _, folder = trained(loss="hf_softmax", loss_option="rebuild_every=100")
    assert growing.show(folder)["has_forest"]
    more, _ = dataset((*COUNTS, 4), name="more")
    made = flags("more", data_dir=more, loss="hf_softmax", target="none", max_steps=9)
    written = growing.add(folder, str(more), str(folder_of(made)))
    assert not growing.show(written.path)["has_forest"]
    assert train.main([*made, "--resume"]) == 0
    assert growing.show(str(folder_of(made)))["has_forest"]


class TestAdded:
    def test_weights_are_mean_embeddings(self, flags, trained, dataset, tmp_path):
        made, folder = trained(devices="cpu:2", per_batch_size=4)
        assert train.main([*made, "--resume", "--max-steps", "8"]) == 0  # saves the model, too
        more, _ = dataset((*COUNTS, 3, 2), name="more")
        written = growing.add(folder, str(more), str(tmp_path / "out"))
        by_model = growing.add(
            folder, str(more), str(tmp_path / "by model"), model=f"{parse(made).prefix},0"
        )
        before, after = arrays_of(states_path(folder)), arrays_of(written.path)
        np.testing.assert_array_equal(after["weight"], arrays_of(by_model.path)["weight"])
        embed = growing.load_model(f"{parse(made).prefix},0")
        records = Records(more)
        for label in (5, 6):
            sums = np.zeros(8)
            for image in np.flatnonzero(records.labels == label):
                pixels = load_rgb(records.read(int(image))[1]).transpose(2, 0, 1)
                both = embed(np.stack([pixels, pixels[:, :, ::-1]])).sum(axis=0)
                sums += both / np.linalg.norm(both)
            expected = sums / np.linalg.norm(sums)
            expected *= np.median(np.linalg.norm(before["weight"], axis=1))
            np.testing.assert_allclose(after["weight"][label], expected, rtol=1e-4, atol=1e-5)
        for name in before:
            np.testing.assert_array_equal(after[name][:5], before[name])
        assert not after["state0"][5:].any()

    def test_nobody(self, trained, faces, tmp_path):
        _, folder = trained()
        with pytest.raises(ValueError, match=r"has 5 classes, and .* 5: there is nobody to add"):
            growing.add(folder, str(faces), str(tmp_path / "out"))

    def test_labels_without_images(self, trained, dataset, tmp_path):
        _, folder = trained()
        gap, _ = dataset((*COUNTS, 0, 3), name="gap")
        with pytest.raises(ValueError, match="1 new classes have no readable image, 5 is the"):
            growing.add(folder, str(gap), str(tmp_path / "out"))

    def test_a_network_of_another_width(self, trained, dataset, symbol_model, tmp_path):
        _, folder = trained()
        more, _ = dataset((*COUNTS, 3), name="more")
        with pytest.raises(ValueError, match="of width 16, the class weights of width 8"):
            growing.add(folder, str(more), str(tmp_path / "out"), f"{symbol_model()},0")

    def test_classes_that_are_not_the_labels(self, trained, dataset, tmp_path):
        _, folder = trained(images_filter=8)
        more, _ = dataset((*COUNTS, 3), name="more")
        with pytest.raises(ValueError, match="by --images-filter 8 and numbered the others itself"):
            growing.add(folder, str(more), str(tmp_path / "out"))


class TestRemapped:
    def test_after_a_merger_of_datasets(self, trained, dataset, tmp_path):
        """As rec_merge writes it: some people left out, those of another set among them."""
        _, folder = trained()
        joint, _ = dataset((2, 3, 2, 2, 2), name="joint")
        rows = [
            (0, "", "few", 0, 9, ""),
            ("", "", "few", 1, 8, "somebody"),
            (1, "", "few", 2, 10, ""),
            (2, "", "few", 4, 9, ""),
            (3, "", "others", 0, 2, ""),
            (4, "", "others", 1, 2, ""),
        ]
        heading = ("label", "name", "dataset", "old_label", "images", "left_out_for")
        write_table(str(joint / "identities.csv"), heading, rows)
        written = growing.remap(folder, str(joint), str(tmp_path / "out"), of_set="few")
        before, after = arrays_of(states_path(folder)), arrays_of(written.path)
        for name in before:
            assert len(after[name]) == 5
            np.testing.assert_array_equal(after[name][:3], before[name][[0, 2, 4]])
        assert after["weight"][3:].any(axis=1).all()
        assert not after["state0"][3:].any()
        with pytest.raises(ValueError, match="it joins few, others: say by --set"):
            growing.remap(folder, str(joint), str(tmp_path / "other"))
        with pytest.raises(ValueError, match="--set fow: legal are few, others"):
            growing.remap(folder, str(joint), str(tmp_path / "other"), of_set="fow")

    def test_by_names(self, trained, faces, dataset, tmp_path):
        _, folder = trained()
        new, _ = dataset((2, 3, 2), name="new")
        for where, names in ((faces, "abcde"), (new, "dxa")):
            rows = [(label, name, 2) for label, name in enumerate(names)]
            write_table(str(where / "identities.csv"), ("label", "name", "images"), rows)
        written = growing.remap(folder, str(new), str(tmp_path / "out"), old_dataset=str(faces))
        before, after = arrays_of(states_path(folder)), arrays_of(written.path)
        for name in before:
            np.testing.assert_array_equal(after[name][[0, 2]], before[name][[3, 0]])
        assert len(after["weight"]) == 3

    def test_by_a_map_that_joins_people(self, trained, dataset, tmp_path):
        _, folder = trained()
        new, _ = dataset((2, 3), name="new")
        rows = [(4, 0, 1), (0, 1, 6), (3, 1, 2)]
        write_table(str(tmp_path / "map.csv"), ("old_label", "label", "images"), rows)
        written = growing.remap(
            folder, str(new), str(tmp_path / "out"), label_map=str(tmp_path / "map.csv")
        )
        before, after = arrays_of(states_path(folder)), arrays_of(written.path)
        np.testing.assert_array_equal(after["weight"][0], before["weight"][4])
        momentum = 0.75 * before["state0"][0] + 0.25 * before["state0"][3]
        np.testing.assert_allclose(after["state0"][1], momentum, rtol=1e-5, atol=1e-9)

    def test_a_file_that_says_nothing(self, trained, dataset, tmp_path):
        _, folder = trained()
        new, _ = dataset((2, 3), name="new")
        write_table(str(tmp_path / "map.csv"), ("old", "label"), [(4, 0)])
        with pytest.raises(ValueError, match="it needs the columns old_label and label"):
            growing.remap(folder, str(new), "out", label_map=str(tmp_path / "map.csv"))
        write_table(str(tmp_path / "map.csv"), ("old_label", "label"), [("x", 0)])
        with pytest.raises(ValueError, match=r"map.csv: line 2: labels and images are whole"):
            growing.remap(folder, str(new), "out", label_map=str(tmp_path / "map.csv"))
        write_table(str(tmp_path / "map.csv"), ("old_label", "label"), [(1, 7)])
        with pytest.raises(ValueError, match="has 2 classes, and no label 7"):
            growing.remap(folder, str(new), "out", label_map=str(tmp_path / "map.csv"))


class TestAdam:
    """Its two states per class, which no run of train.py has, but a head of one's own."""

    @pytest.fixture
    def adam(self, trained, tmp_path):
        """Return a function that makes a head with Adam and saves or loads a run's state."""
        _, folder = trained()
        backbone = checkpoint.load_arrays(states_path(folder) / "backbone.params")

        class Backbone:
            parameters = staticmethod(lambda: backbone)
            momenta = staticmethod(dict)
            load_parameters = load_momenta = staticmethod(lambda _: None)

        def make(num_classes):
            head = losses.create("arcface", num_classes, 8, ctx=[mx.cpu(0), mx.cpu(1)], seed=1)
            head.initialize()
            return Trained(Backbone(), head, head.trainer("adam", {"learning_rate": 0.01}))

        facts = {key: states.read_facts(str(states_path(folder)))[key] for key in ("settings",)}
        return make, {**facts, "epoch": 0, "images_seen": 0}

    @staticmethod
    def step(one, seed):
        rng = np.random.default_rng(seed)
        x, labels = mx.nd.array(rng.normal(size=(6, 8))), rng.integers(0, 4, 6)
        with autograd.record():
            loss = one.head(x, labels)
        loss.backward()
        one.head_trainer.step(6)

    def test_the_states_follow_their_classes(self, adam, tmp_path):
        make, facts = adam
        one = make(6)
        for seed in range(3):
            self.step(one, seed)
        path = checkpoint.save_state(str(tmp_path / "run" / "states"), 3, one, facts)
        before = arrays_of(path)
        assert set(before) == {"weight", "state0", "state1"}
        dropped = growing.drop(path, np.array([4]), str(tmp_path / "out"))
        for name, array in arrays_of(dropped.path).items():
            np.testing.assert_array_equal(array, before[name][[0, 1, 2, 3, 5]])
        momenta = str(tmp_path / "momenta.npy")
        growing.export(path, str(tmp_path / "weights.npy"), momenta)
        assert np.load(momenta).shape == (2, 6, 8)
        back = growing.replace(path, str(tmp_path / "weights.npy"), str(tmp_path / "back"), momenta)
        other = make(6)
        checkpoint.load_state(back.path, other)
        for seed in (3, 4):
            self.step(one, seed)
            self.step(other, seed)
        np.testing.assert_array_equal(one.head.class_weights(), other.head.class_weights())

    def test_momenta_of_another_optimizer(self, adam, trained, tmp_path):
        make, facts = adam
        path = checkpoint.save_state(str(tmp_path / "run" / "states"), 3, make(5), facts)
        _, folder = trained("sgd")
        growing.export(folder, str(tmp_path / "w.npy"), str(tmp_path / "m.npy"))
        with pytest.raises(ValueError, match=r"1 momenta of shape .* optimizer has 2 of shape"):
            growing.replace(
                path, str(tmp_path / "w.npy"), str(tmp_path / "out"), str(tmp_path / "m.npy")
            )
        with pytest.raises(ValueError, match="2 and 1 states per class"):
            growing.join_heads(path, folder, str(tmp_path / "out"))


class TestRefusals:
    def test_a_run_that_exists(self, trained, tmp_path):
        _, folder = trained()
        with pytest.raises(FileExistsError, match="holds the states of a run already"):
            growing.drop(folder, np.array([1]), folder)

    def test_a_damaged_state(self, trained, tmp_path):
        _, folder = trained()
        path = states_path(folder) / "head.states"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(
            ValueError,
            match=r"state-00000007 is damaged \(head.states: it has .*\); give .* another",
        ):
            growing.drop(folder, np.array([1]), str(tmp_path / "out"))

    @pytest.mark.parametrize("what", ["class weight", "the momentum of class"])
    def test_numbers_that_are_not_finite(self, trained, tmp_path, what):
        _, folder = trained()
        sound, damaged = np.ones((5, 8)), np.ones((5, 8))
        damaged[3, 2] = np.nan
        weights, momenta = (damaged, sound) if what == "class weight" else (sound, damaged)
        np.save(tmp_path / "w.npy", weights)
        np.save(tmp_path / "m.npy", momenta)
        files = (str(tmp_path / name) for name in ("w.npy", "out", "m.npy"))
        with pytest.raises(ValueError, match=f"{what} 3 holds NaN or infinite numbers"):
            growing.replace(folder, *files)
        assert not list((tmp_path / "out" / "states").iterdir())

    def test_other_widths(self, trained, tmp_path):
        _, folder = trained()
        np.save(tmp_path / "w.npy", np.ones((5, 9)))
        with pytest.raises(ValueError, match="of width 9, the state has width 8"):
            growing.replace(folder, str(tmp_path / "w.npy"), str(tmp_path / "out"))
        _, wide = trained("wide", emb_size=9)
        with pytest.raises(ValueError, match=r"width 8, .* width 9: heads of one width"):
            growing.join_heads(folder, wide, str(tmp_path / "out"))


def test_shown(trained):
    _, folder = trained()
    shown = growing.show(folder, pairs=3)
    arrays = arrays_of(states_path(folder))
    lengths = np.linalg.norm(arrays["weight"], axis=1)
    assert (shown["classes"], shown["width"], shown["step"]) == (5, 8, 7)
    assert shown["loss"]["preset"] == "dsoftmax"
    for key, function in (("min", np.min), ("median", np.median), ("max", np.max)):
        assert shown["lengths"][key] == pytest.approx(function(lengths), rel=1e-6)
    momenta = np.linalg.norm(arrays["state0"], axis=1)
    assert shown["momenta"]["state0"]["mean"] == pytest.approx(momenta.mean(), rel=1e-6)
    unit = arrays["weight"] / lengths[:, None]
    best = max((unit[a] @ unit[b], a, b) for a in range(5) for b in range(a + 1, 5))
    assert len(shown["closest"]) == 3
    assert shown["closest"][0] == {
        "one": best[1],
        "other": best[2],
        "cosine": pytest.approx(best[0]),
    }
