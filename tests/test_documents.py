"""What the documents show works as shown: snippets, links, commands, flags, names and defaults."""

import ast
import contextlib
import functools
import importlib
import io
import re
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from dsoftmax import losses
from dsoftmax.losses import presets, triplet
from dsoftmax.recognition import networks
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.tools.dispatcher import find_commands

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("losses", "recognition", "eval", "tools")
READMES = ("README.md", *(f"{folder}/README.md" for folder in FOLDERS))
DOCUMENTS = (*READMES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tools/planning.md")
# Of insightface's src/train_softmax.py when it was removed.
TRAIN_SOFTMAX = (
    "data-dir prefix pretrained ckpt loss-type verbose max-steps end-epoch network image-size "
    "version-se version-input version-output version-unit version-multiplier version-act "
    "use-deformable lr lr-steps wd fc7-wd-mult fc7-lr-mult fc7-no-bias bn-mom mom emb-size "
    "per-batch-size margin-m margin-s margin-a margin-b easy-margin margin beta beta-min "
    "beta-freeze gamma power scale rand-mirror cutoff color images-filter target ce-loss"
)
RECIPE = "linear_margin"  # the loss that CONTRIBUTING.md adds


@functools.lru_cache(maxsize=None)
def read(document):
    return (REPOSITORY / document).read_text(encoding="utf-8")


def fences(document, language):
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(document), re.DOTALL | re.MULTILINE)


def prose(document):
    """Return a document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", read(document), flags=re.DOTALL | re.MULTILINE)


def code_spans(document, ours=False):
    """Return what is set as code in the text; `ours`: but for what a table has as "there"."""
    text = prose(document)
    if ours:
        for table in re.findall(r"^\| there \| here \|\n(?:\|.*\n)+", text, re.MULTILINE):
            text = text.replace(table, re.sub(r"^\|[^|]*\|", "|", table, flags=re.MULTILINE))
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", text)]


def test_no_flag_of_train_softmax_is_left_out():
    section = (
        read("recognition/README.md").split("### `src/train_softmax.py`")[1].split("\n### ")[0]
    )
    there = re.findall(r"--([\w-]+)", " ".join(re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)))
    assert set(TRAIN_SOFTMAX.split()) <= set(there)


# Snippets


@pytest.fixture
def names(dataset, jpeg, monkeypatch, symbol_model):
    """Return what the snippets take for granted, at a size a test can afford."""
    folder, _ = dataset(counts=(60, 70), size=(112, 112))
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(presets, "PRESETS", dict(presets.PRESETS))
    write_pack("lfw.bin", [jpeg() for _ in range(40)], [True, False] * 10)
    Path("models", "y1").mkdir(parents=True)
    symbol_model("models/y1/model")
    for name in ("ann.jpg", "bo.jpg"):
        Path(name).write_bytes(jpeg(112, 112))
    return {
        "network": lambda images: images,
        "images": mx.nd.random.normal(shape=(8, 512)),
        "labels": mx.nd.arange(8, dtype="int32"),
        "batch_size": 8,
    }


@pytest.mark.parametrize(
    "document", [document for document in DOCUMENTS if fences(document, "python")]
)
def test_snippets(document, names):
    """All of a document's, in its order, as a reader would type them."""
    for number, block in enumerate(fences(document, "python")):
        block = block.replace("num_classes=757000", "num_classes=757")
        exec(compile(block, f"{document}, snippet {number}", "exec"), names)


def test_the_documents_with_snippets():
    assert [document for document in READMES if not fences(document, "python")] == [
        "tools/README.md"
    ]


def recipe(name):
    """Return the marked block of CONTRIBUTING.md."""
    text = read("CONTRIBUTING.md")
    (block,) = re.findall(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    return block


def test_the_recipe_for_a_loss_and_its_twin_agree(rng):
    names = {}
    exec(recipe("loss") + recipe("twin"), names)
    criterion = names["LinearMargin"](scale=32)
    z_y, n = rng.uniform(-1, 1, 50), rng.uniform(0, 60, 50)
    expected = [names[RECIPE](*row, scale=32) for row in zip(z_y, n)]
    loss = criterion(mx.nd.array(z_y), mx.nd.array(n)).asnumpy()
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)


# Links and paths


def anchors(document):
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_pictures(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (REPOSITORY / document).parent / path if path else REPOSITORY / document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.resolve().relative_to(REPOSITORY)), link


@pytest.mark.parametrize("document", [*READMES, "CONTRIBUTING.md"])
def test_paths(document):
    inside = re.compile(rf"(?:{'|'.join(FOLDERS)}|tests)/[\w/.]*")
    missing = [
        span
        for span in code_spans(document)
        if inside.fullmatch(span) and not (REPOSITORY / span).exists()
    ]
    assert not missing


# Commands


@functools.lru_cache(maxsize=None)
def flags_of(command):
    """Return the flags that ``--help`` of a command lists; `command` is as tools/rec_info."""
    module = importlib.import_module(f"dsoftmax.{command.replace('/', '.')}")
    text = help_of(module) + "".join(
        help_of(module, name) for name in getattr(module, "ACTIONS", ())
    )
    options = re.findall(r"^ +(-.*?)(?:  |$)", text, re.MULTILINE)
    return {flag for option in options for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", option)}


def help_of(module, *action):
    """Return what ``--help`` of a command, or of one of its actions, prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as end:
        module.main([*action, "--help"])
    assert end.value.code == 0
    return out.getvalue()


def is_command(path):
    return 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")


COMMANDS = sorted(
    f"{folder}/{path.stem}"
    for folder in FOLDERS
    for path in (REPOSITORY / folder).glob("*.py")
    if is_command(path)
)


def shown_commands(document):
    """Return the command lines of a document, each as a command of ours and its arguments."""
    blocks = "\n".join(fences(document, "bash")).replace("\\\n", " ")
    lines = [line.partition(" #")[0] for line in blocks.splitlines()] + code_spans(document)
    shown = []
    for line in lines:
        starts = re.finditer(
            r"(?:python3?|/python)(?: -u)?(?: -m)? (?:dsoftmax\.)?"
            r"(losses|recognition|eval|tools)[/.](\w+)(?:\.py)?(?=[\s']|$)",
            line,
        )
        starts = list(starts)
        ends = [start.start() for start in starts[1:]] + [len(line)]
        for start, end in zip(starts, ends):
            shown.append((f"{start[1]}/{start[2]}", line[start.end() : end]))
    return shown


def typed_names(document):
    """Return what a document says after the installed command `dsoftmax`."""
    lines = [*"\n".join(fences(document, "bash")).splitlines(), *code_spans(document)]
    return [name for line in lines for name in re.findall(r"^dsoftmax (\w+)", line)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_after_the_installed_command(document):
    assert set(typed_names(document)) <= set(find_commands())


def test_commands_are_seen():
    assert {"eval/verification", "recognition/train", "tools/launch"} <= set(COMMANDS)
    shown = [command for document in DOCUMENTS for command in shown_commands(document)]
    assert len(shown) > 50
    assert {command for command, _ in shown} == set(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_their_flags(document):
    for command, arguments in shown_commands(document):
        assert command in COMMANDS
        known = flags_of(command)
        shown = re.findall(r"(?<!\S)--?[a-z][\w-]*", arguments)
        assert set(shown) <= known, f"{command}{arguments}"
        if command == "recognition/train":
            for loss in re.findall(r"--loss (\w+)", arguments):
                assert loss in (*losses.names(), *triplet.TITLES, RECIPE)
            for network in re.findall(r"--network (\w+)", arguments):
                assert network in networks.names()


@pytest.mark.parametrize("document", READMES)
def test_flags_in_the_text(document):
    everything = {flag for command in COMMANDS for flag in flags_of(command)}
    for span in code_spans(document, ours=True):
        if span.startswith("-"):
            unquoted = re.sub(r"'[^']*'", "", span)  # a value may have flags of its own
            shown = re.findall(r"(?<!\S)--?[a-z][\w-]*", unquoted)
            assert set(shown) <= everything, span


@pytest.mark.parametrize("document", DOCUMENTS)
def test_scripts_and_the_tests_they_select(document):
    lines = [*code_spans(document), *"\n".join(fences(document, "bash")).splitlines()]
    for line in lines:
        for script in re.findall(r"\bbash (\S+\.sh)", line.replace("bash job.sh", "")):
            assert (REPOSITORY / script).is_file(), line
        for script, arguments in re.findall(r"\bpython (tests/\S+)([^#]*)", line):
            text = (REPOSITORY / script).read_text(encoding="utf-8")
            assert all(f'"{flag}"' in text for flag in re.findall(r"--\w+", arguments)), line
        for keyword in re.findall(r"run\.sh .*-k (\w+)", line):
            assert any(keyword in name for name in names_of_tests()), line


@functools.lru_cache(maxsize=None)
def names_of_tests():
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    return [path.name for path in files] + [
        name for text in texts for name in re.findall(r"def (test_\w+)", text)
    ]


# What must be there


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 200


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_its_folder_s_readme(command):
    assert command in [shown for shown, _ in shown_commands(f"{command.split('/')[0]}/README.md")]


def rows_of_presets():
    """Return the preset and the options of each row of the table in losses/README.md."""
    section = read("losses/README.md").partition("## Presets")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \|.*\| `([^`]*)`[^`]*\|$", section, re.MULTILINE))


def test_the_table_of_presets_is_complete():
    assert sorted(rows_of_presets()) == sorted(losses.names())


@pytest.mark.parametrize("preset", losses.names())
def test_the_table_of_presets_has_the_defaults(preset):
    call = ast.parse(f"f({rows_of_presets()[preset]})", mode="eval").body
    options = {
        word.arg: eval(compile(ast.Expression(word.value), "README", "eval"))
        for word in call.keywords
    }
    assert repr(losses.create(preset, 10, 4, **options)) == repr(losses.create(preset, 10, 4))


@pytest.mark.parametrize("name", sorted(set(losses.__all__) - {"Criterion", "names"}))
def test_public_names_are_documented(name):
    text = getattr(losses, name).__doc__
    assert text
    if name not in ("Head", "HeadTrainer"):  # made by create, whose example shows them
        assert text.count(">>> ") >= 2
