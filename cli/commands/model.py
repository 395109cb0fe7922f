"""`unicron model`: what a checkpoint's model is, text that it generates, its export."""

import os
from pathlib import Path

import msgspec

from ...events.errors import UsageError
from ...events.words import install
from ..terminal import console
from ..terminal.format import count, labelled, number_of

try:
    from ...workers.training.inference import decoder, hugging_face, stored_model
except ModuleNotFoundError as error:
    raise UsageError(
        f"this command needs {error.name}, which is not installed", install("train")
    ) from None


def info(path: str, *, as_json: bool) -> None:
    """Print what the model is. Raises UsageError."""
    found = stored_model.find(path)
    of, numbers, folder = found.of, found.numbers, found.stored.folder
    loss = numbers["losses"][-1] if numbers["losses"] else None
    console.show(
        {
            "path": folder,
            **msgspec.to_builtins(of),
            "parameters": found.num_params,
            "iteration": numbers["step_version"],
            "loss": loss,
        },
        [
            *labelled(
                "model",
                f"GPT, {count(found.num_params)} parameters: {of.n_layer} layers, "
                f"hidden {of.n_embd}, {of.n_head} heads, sequence {of.n_positions}, "
                f"{'tied' if of.tie_word_embeddings else 'untied'} embeddings",
            ),
            *labelled("tokens", f"{of.vocab_size} bytes; {of.eos_token_id} ends a document"),
            *labelled(
                "trained",
                f"{number_of(numbers['step_version'], 'iteration')} in "
                f"{of.torch_dtype}" + (f", loss {loss:.4g}" if loss is not None else ""),
            ),
            *labelled("folder", folder),
        ],
        as_json=as_json,
    )


def generate(path: str, *, prompt: str, tokens: int, temperature: float) -> None:
    """Print the prompt and text that follows it. Raises UsageError."""
    if not prompt:
        raise UsageError("--prompt is empty", "give the model a beginning, one letter at least")
    given = os.fsencode(prompt)  # a byte of a command line that is not UTF-8 is one of the prompt
    found = decoder.generate(
        stored_model.load(path).float(), given, tokens, temperature=temperature
    )
    # A model can make control characters, which a terminal would obey.
    text = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\ufffd"
        for letter in (given + bytes(found)).decode(errors="replace")
    )
    console.lines(text.expandtabs().split("\n"))


def export(path: str, *, target: Path) -> None:
    """Write a Hugging Face folder. Raises UsageError, OSError."""
    if target.exists():
        raise UsageError(f"{target} is there already", "name a new folder")
    hugging_face.export(stored_model.load(path), target)
    console.out(f"{target}: {', '.join(sorted(file.name for file in target.iterdir()))}")
    console.talk(f"next: transformers.AutoModelForCausalLM.from_pretrained({str(target)!r})")
