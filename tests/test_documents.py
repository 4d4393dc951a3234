"""What README.md and CONTRIBUTING.md show works as shown."""

import re
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from dsoftmax import losses
from dsoftmax.losses import criteria
from dsoftmax.recognition.data.packs import write_pack

REPOSITORY = Path(__file__).resolve().parent.parent


def python_blocks(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def names(dataset, jpeg, monkeypatch):
    """What the snippets take for granted, at a size a test can afford."""
    folder, _ = dataset(counts=(60, 70), size=(112, 112))
    monkeypatch.chdir(folder.parent)
    write_pack("lfw.bin", [jpeg() for _ in range(40)], [True, False] * 10)
    return {
        "network": lambda images: images,
        "images": mx.nd.random.normal(shape=(8, 512)),
        "labels": mx.nd.arange(8, dtype="int32"),
        "batch_size": 8,
    }


@pytest.mark.parametrize("number", range(len(python_blocks("README.md"))))
def test_readme(number, names):
    block = python_blocks("README.md")[number].replace("757000", "757")
    exec(compile(block, "README.md", "exec"), names)


def test_readme_names_every_loss():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    missing = [name for name in losses.names() if f"`{name}`" not in text]
    assert not missing


def test_readme_names_every_command():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    text = text.replace("tools.", "tools/")
    commands = [
        f"{path.parent.name}/{path.stem}"
        for folder in ("tools", "eval", "recognition")
        for path in (REPOSITORY / folder).glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    assert {"eval/verification", "recognition/train"} <= set(commands)
    assert not [name for name in commands if name not in text]


def test_the_worked_example_is_the_shipped_loss(rng):
    (block,) = python_blocks("CONTRIBUTING.md")
    names = dict(vars(criteria))
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    assert names["AdaFace"] is not losses.AdaFace
    batch = criteria.BatchContext(0, mx.nd.array(rng.uniform(5, 40, 9)))
    z_y, n = mx.nd.array(rng.uniform(-1, 1, 9)), mx.nd.array(rng.uniform(0, 40, 9))
    values = []
    for kind in (names["AdaFace"], losses.AdaFace):
        criterion = kind(64)
        values.append(criterion(z_y, n, None, *criterion.arguments(batch)).asnumpy())
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("name", sorted(set(losses.__all__) - {"Criterion", "names"}))
def test_public_names_are_documented(name):
    text = getattr(losses, name).__doc__
    assert text
    if name not in ("Head", "HeadTrainer"):  # made by create, whose example shows them
        assert text.count(">>> ") >= 2
