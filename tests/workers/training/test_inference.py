"""The model of a checkpoint in plain torch: it equals Megatron's, and is exported as a GPT-2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_process
import hugging_face as transformers
import pytest
import share_work
import torch
import torch.distributed.checkpoint as dcp
import worlds
from cli_process import refused, unicron
from msgspec.structs import replace
from reshard_work import TRAIN, Layout
from safetensors.torch import load_file
from torch.nn import functional
from unicron.events.errors import UsageError
from unicron.events.spec.job import Model, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions
from unicron.workers.agent.publish import publish
from unicron.workers.training.checkpoint import checkpoint
from unicron.workers.training.inference import decoder, hugging_face, stored_model
from unicron.workers.training.model import architecture
from unicron.workers.training.model import trainee as model
from unicron.workers.training.process.history import History

SMALL = Model(num_layers=2, hidden=32, num_heads=4, sequence=16, dropout=0.1)
UNTIED = replace(SMALL, tie_embeddings=False)
ROUNDING = 1e-5
"""Relative to the largest logit; in fp32 a number has seven digits."""
ITERATIONS = 5
GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/model.md"


def trained(alone: Any, train: Train) -> model.TrainingModel:
    """A model whose parameters are all drawn, also those that training begins at 0 or 1."""
    made = model.build(train, torch.device("cpu"), alone, Axes(), 0)
    draws = torch.Generator().manual_seed(train.seed)
    for _, param in made.named_parameters():
        param.data.add_(0.3 * torch.randn(param.shape, generator=draws))
    made.clear()
    made.scheduler.step(ITERATIONS * train.batch.global_)
    return made


def saved(
    alone: Any, output: Path | str, of: Model = SMALL, precision: Any = "fp32"
) -> tuple[model.TrainingModel, str]:
    """A trained model, and its checkpoint in the output of a task."""
    train = Train(model=of, iterations=ITERATIONS, precision=precision, output=str(output))
    made, path = trained(alone, train), f"{output}/gen-1/iter-{ITERATIONS}"
    history = History()
    for iteration in range(ITERATIONS):
        history.add(iteration, 4.5 - iteration / 2, 0.1)
    # Adam's step of a model that has not stepped is 0, as in a checkpoint at the start.
    checkpoint.save(path, made, ITERATIONS, history)
    publish(
        cluster="default",
        order=1,
        at_s=1.0,
        task=1,
        generation=1,
        output=str(output),
        path=f"gen-1/iter-{ITERATIONS}",
    )
    return made, path


@pytest.fixture
def output(alone: Any, tmp_path: Path) -> Path:
    saved(alone, tmp_path / "out")
    return tmp_path / "out"


TOKENS = torch.randint(0, 256, (3, SMALL.sequence), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("of", [SMALL, UNTIED], ids=["tied", "untied"])
def test_its_logits_are_megatrons(alone: Any, tmp_path: Path, of: Model) -> None:
    made, path = saved(alone, tmp_path, of)
    made.ddps[0].eval()
    with torch.no_grad():
        expected = made.ddps[0](TOKENS, torch.arange(SMALL.sequence).expand(3, -1), None)
        found = stored_model.load(path)(TOKENS)
    assert found.shape == (3, SMALL.sequence, 256)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_of_16_bits_are_those_that_were_trained(
    alone: Any, tmp_path: Path, precision: str
) -> None:
    made, path = saved(alone, tmp_path, precision=precision)
    weights = stored_model.load(path).state_dict()
    assert set(weights) == {name for name, _ in made.named_parameters()}
    assert all(weights[name].equal(param) for name, param in made.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {model.DTYPES[precision]}


@pytest.mark.parametrize(
    ("train", "layout"),
    [
        (TRAIN, Layout(Axes(tp=2, pp=2))),
        pytest.param(
            replace(TRAIN, model=replace(TRAIN.model, tie_embeddings=False)),
            Layout(Axes(tp=2, pp=2)),
            marks=pytest.mark.thorough,
        ),
        pytest.param(TRAIN, Layout(Axes(pp=3, chunks=2)), marks=pytest.mark.thorough),
        pytest.param(
            replace(TRAIN, precision="bf16"),
            Layout(Axes(tp=2, dp=2), "sharded"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_what_several_members_saved_is_one_model(
    tmp_path: Path, train: Train, layout: Layout
) -> None:
    """Each layout has the same weights after the step of share_work."""
    for name, each in (("split", layout), ("whole", Layout(Axes()))):
        worlds.run(num_positions(each.axes), share_work.save, train, each, str(tmp_path / name))
    assert len(list(tmp_path.glob("split/*.distcp"))) == num_positions(layout.axes)
    split, whole = (
        stored_model.load(str(tmp_path / name)).state_dict() for name in ("split", "whole")
    )
    assert split.keys() == whole.keys()
    assert all(split[name].equal(whole[name]) for name in whole)


def test_a_checkpoint_at_a_url_is_found_like_one_in_a_folder(alone: Any, tmp_path: Path) -> None:
    _, path = saved(alone, f"file://{tmp_path}/bucket")
    _, local = saved(alone, tmp_path / "out")
    for place in (path, f"file://{tmp_path}/bucket", f"file://{tmp_path}/bucket/latest"):
        assert stored_model.find(place).stored.folder == path
    for place in (local, str(tmp_path / "out"), str(tmp_path / "out/latest")):
        assert stored_model.find(place).stored.folder == local
    ours, theirs = stored_model.load(path).state_dict(), stored_model.load(local).state_dict()
    assert all(theirs[name].equal(weight) for name, weight in ours.items())


# --- text ----------------------------------------------------------------------------------------
def test_the_temperature_and_the_seed_decide_the_text(output: Path) -> None:
    found = stored_model.load(str(output))

    def text(**options: Any) -> list[int]:
        return decoder.generate(found, b"The ", 40, **options)

    drawn = text(seed=1)
    assert text(seed=1) == drawn != text(seed=2)
    greedy, tokens = text(temperature=0), list(b"The ")
    for token in greedy:  # also where the text is longer than the model's sequence
        assert token == found(torch.tensor([tokens[-SMALL.sequence :]]))[0, -1].argmax()
        tokens.append(token)
    assert text(temperature=1e-3) == greedy


def test_it_stops_where_the_document_ends(output: Path) -> None:
    found = stored_model.load(str(output))
    greedy = decoder.generate(found, b"The ", 8, temperature=0)
    found.of = replace(found.of, eos_token_id=greedy[3])
    stopped = decoder.generate(found, b"The ", 8, temperature=0)
    assert stopped == greedy[: greedy.index(greedy[3])]


# --- export --------------------------------------------------------------------------------------
def gpt2(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits by the definition of GPT-2, with the names of transformers."""
    weights, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    width = config["n_embd"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(
            x,
            (width,),
            weights[f"{name}.weight"],
            weights[f"{name}.bias"],
            config["layer_norm_epsilon"],
        )

    def conv(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"]
    for number in range(config["n_layer"]):
        layer = f"transformer.h.{number}"
        qkv = conv(f"{layer}.attn.c_attn", norm(f"{layer}.ln_1", x))
        query, key, value = (
            part.unflatten(2, (config["n_head"], -1)).transpose(1, 2)
            for part in qkv.split(width, 2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + conv(f"{layer}.attn.c_proj", mixed.transpose(1, 2).flatten(2))
        inner = functional.gelu(conv(f"{layer}.mlp.c_fc", norm(f"{layer}.ln_2", x)))
        x = x + conv(f"{layer}.mlp.c_proj", inner)
    tied = weights["transformer.wte.weight"] if config["tie_word_embeddings"] else None
    return norm("transformer.ln_f", x) @ (weights["lm_head.weight"] if tied is None else tied).T


@pytest.mark.parametrize("of", [SMALL, UNTIED], ids=["tied", "untied"])
def test_the_export_is_a_gpt2_with_the_same_logits(alone: Any, tmp_path: Path, of: Model) -> None:
    found = stored_model.load(saved(alone, tmp_path / "out", of)[1])
    hugging_face.export(found, tmp_path / "made")
    with torch.no_grad():
        expected = found(TOKENS)
        difference = (gpt2(tmp_path / "made", TOKENS) - expected).abs().max()
    assert difference <= ROUNDING * expected.abs().max()
    vocabulary = json.loads((tmp_path / "made/tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    # As in the vocabulary of OpenAI's GPT-2.
    assert [vocabulary[letter] for letter in "Ā!~ĠŃ®ÿ"] == [0, 33, 126, 32, 173, 174, 255]


@pytest.mark.thorough
@pytest.mark.parametrize(("of", "precision"), [(SMALL, "fp32"), (UNTIED, "fp32"), (SMALL, "bf16")])
def test_transformers_loads_the_export(
    alone: Any, tmp_path: Path, of: Model, precision: str
) -> None:
    _, path = saved(alone, tmp_path / "out", of, precision)
    hugging_face.export(stored_model.load(path), tmp_path / "made")
    try:
        found = transformers.look(Path(path), tmp_path / "made")
    except transformers.NotInstalled as why:
        pytest.skip(str(why))
    assert found.pop("difference") <= ROUNDING
    assert found == {
        "class": "GPT2LMHeadModel",
        "dtype": str(model.DTYPES[precision]),
        "other_keys": [],
        "is_bytes": True,
        "is_decoded": True,
        "vocabulary": 256,
        "generates_alike": True,
    }


def test_a_failed_export_leaves_nothing(output: Path, tmp_path: Path) -> None:
    """No file may be longer than 10 kB, as on a full disk: its weights are."""
    code = (
        "import resource, signal, sys\n"
        "from unicron.cli.app import run_command\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        f"sys.exit(run_command(['model', 'export', {str(output)!r}, 'folder/made']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=cli_process.LIMIT_S,
        cwd=tmp_path,
    )
    refused(done, "file too large", code=1)
    assert list((tmp_path / "folder").iterdir()) == []


def test_the_programs_of_the_guide_read_the_model(alone: Any, tmp_path: Path) -> None:
    """Those with torch, and with Unicron; they end with the loss of a text, and the weights."""
    _, path = saved(alone, tmp_path / "out", replace(SMALL, sequence=64))
    programs = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    for program in programs[1:]:
        found: dict[str, Any] = {}
        exec(
            program.replace("build/demo/alpha/latest", path).replace("build/demo/alpha", path),
            found,
        )
    expected = stored_model.load(path)
    assert found["config"] == json.loads(architecture.encode(expected.of))
    assert found["weights"].keys() == {f"model.{name}" for name in expected.state_dict()}
    assert all(
        found["weights"][f"model.{name}"].equal(weight)
        for name, weight in expected.state_dict().items()
    )


# --- the commands --------------------------------------------------------------------------------
def test_info_shows_what_the_model_is(output: Path, tmp_path: Path) -> None:
    done = unicron("model", "info", str(output))
    assert done.returncode == 0, done.stderr
    num_params = 256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    assert f"GPT, {num_params:,} parameters: 2 layers, hidden 32, 4 heads" in done.stdout
    assert "5 iterations in float32, loss 2.5\n" in done.stdout
    found = json.loads(unicron("model", "info", str(output), "-o", "json").stdout)
    assert (found["parameters"], found["iteration"], found["loss"]) == (num_params, 5, 2.5)
    assert found["path"] == str(output / "gen-1" / "iter-5")


def test_generate_prints_the_prompt_and_what_follows(output: Path) -> None:
    done = unicron("model", "generate", str(output), "--prompt", "Thé", "--tokens", "30")
    follows = decoder.generate(stored_model.load(str(output)), "Thé".encode(), 30, temperature=0.8)
    assert [letter for letter in done.stdout if letter != "\ufffd"] == [
        letter
        for letter in f"Thé{bytes(follows).decode(errors='replace')}\n"
        if letter.isprintable() or letter in "\n\t"
        if letter != "\ufffd"
    ]
    assert any(not chr(token).isprintable() for token in follows)


def test_the_commands_need_no_megatron(output: Path, tmp_path: Path) -> None:
    """They run without a GPU, a cluster and Megatron, which cannot be imported here."""
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from unicron.cli.app import run_command\n"
        "for words in (['info'], ['generate', '--prompt', 'The', '--tokens', '3'],"
        f" ['export', {str(tmp_path / 'made')!r}]):\n"
        f"    assert run_command(['model', words[0], {str(output)!r}, *words[1:]]) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=cli_process.LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "config.json, model.safetensors, tokenizer.json, tok" in done.stdout


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_a_package_that_is_not_installed_is_named(
    package: str, output: Path, tmp_path: Path
) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from unicron.cli.app import run_command\n"
        f"sys.exit(run_command(['model', 'export', {str(output)!r}, 'made']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=cli_process.LIMIT_S,
        cwd=tmp_path,
    )
    refused(done, f"this command needs {package}")
    assert "which is not installed" in done.stderr


def _without_architecture(folder: Path) -> None:
    (folder / architecture.FILE).unlink()


def _with(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / architecture.FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def _altered(folder: Path) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[2000] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            _without_architecture,
            "has no config.json: an older release or a job's own script wrote it",
        ),
        (_cut("config.json"), "this release knows: Input data was truncated"),
        (
            _with(activation_function="silu"),
            "Invalid enum value 'silu' - at `$.activation_function`",
        ),
        (_with(n_group=2), "contains unknown field `n_group`"),
        (_with(n_layer=10**9), "`int` <= 10000 - at `$.n_layer`"),
        (_with(n_head=5), "n_embd 32 is not divisible by n_head 5"),
        (_with(n_layer=3), "it has no model.decoder.layers.2."),
        (_with(n_layer=1), "has weights that its config.json does not describe"),
        (_with(n_positions=8), "position_embeddings.weight is float32 16x32, not float32 8x32"),
        (_cut(".metadata"), "is damaged: its .metadata cannot be read"),
        (_cut("__0_0.distcp"), "its file __0_0.distcp is cut"),
        (_altered, "its file __0_0.distcp was altered: a checksum is wrong"),
        (lambda folder: (folder / ".metadata").unlink(), "it has no .metadata: it is not complete"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_that_cannot_be_used_is_one_line(
    output: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(output / "latest")
    refused(unicron("model", "generate", str(output), "--prompt", "The"), words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["info", "nothing"], "nothing: the checkpoint is missing"),
        (["info", "/dev/null"], "/dev/null: Not a directory"),
        (["info", "nothing://bucket/run"], "fsspec knows no nothing://"),
        (["info", "file:///nothing/there"], "file:///nothing/there: the checkpoint is missing"),
        (["generate", "OUTPUT", "--prompt", ""], "--prompt is empty"),
        (["export", "OUTPUT", "OUTPUT"], "is there already"),
    ],
)
def test_wrong_input_is_one_line(output: Path, given: list[str], words: str) -> None:
    refused(unicron("model", *(str(output) if word == "OUTPUT" else word for word in given)), words)


def test_a_checkpoint_of_another_program_is_one_line(tmp_path: Path) -> None:
    dcp.save({"decoder.weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    refused(unicron("model", "export", str(tmp_path), "made"), "is not a checkpoint of Unicron")


def test_a_url_whose_latest_is_no_checkpoint_is_one_line(alone: Any, tmp_path: Path) -> None:
    for note in (b"nothing", b"{}", b'{"path": "gen-9/iter-9"}'):
        (tmp_path / "latest").write_bytes(note)
        with pytest.raises(UsageError, match=r"does not name a checkpoint|is missing"):
            stored_model.find(f"file://{tmp_path}")
