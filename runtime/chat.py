"""``rlgraph chat``: a conversation with a model on the embedded engine, in this process."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.nodes.support.chat_template import rendered
from rlgraph.nodes.support.data_file import local_path
from rlgraph.ops.interfaces import Request, Sampling
from rlgraph.reports.plan_file import load
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.export import export, trained_model
from rlgraph.variables import referred, with_values

CHUNK_TOKENS = 8  # generated between two outputs: an answer appears while it is written
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decodes from the first bytes of a character


@dataclass(frozen=True)
class ChatModel:
    """A model directory, with what a graph changes in its configuration."""

    path: str
    config: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


@contextmanager
def chat_model(
    source: Path, untrained: bool = False, name: str | None = None, checkpoint: str | None = None
) -> Iterator[ChatModel]:
    """Provide the model of a run, or of a model directory, for a block.

    The trained model of a run that has not ended is written into a temporary folder, as is that of a
    named checkpoint.

    Args:
        source: a run directory or a model directory.
        untrained: take the model that the run started from.
        name: of the model in the graph; needed where the run trains several.
        checkpoint: its name, such as ``step-000100``, or ``best``; the last one unless given.

    Raises:
        RunError: there is no run or model, no such checkpoint, or no such model in the run.
    """
    plan_file = source / "plan.json"
    if not plan_file.is_file():
        if untrained or name or checkpoint:
            law = f"{source} is not a run (it has no plan.json)"
            raise RunError(f"{law}\n  --before, --model and --checkpoint need a run, as runs/demo")
        if not (source / "config.json").is_file():
            law = f"{source} is neither a run (no plan.json) nor a model (no config.json)"
            raise RunError(f"{law}\n  name a run directory, as runs/demo, or the directory of a model")
        yield ChatModel(str(source))
        return

    plan = load(plan_file)
    name = trained_model(plan, name)
    model = plan.models[name]
    if model.head != "lm":
        raise RunError(f"{name} has no language-model head: it generates no text\n  choose another: --model")
    if untrained:
        path = local_path(with_values(model.path, referred(model)))
        if not Path(path).exists() and path.count("/") != 1:
            law = f"{path}, the model that training started from, does not exist"
            raise RunError(
                f"{law}\n  start the command where the run was started: paths are relative to that"
            )
        yield ChatModel(path, model.config, model.trust_remote_code)
        return
    exported = source / "models" / name
    if checkpoint is None and exported.is_dir():
        yield ChatModel(str(exported), {}, model.trust_remote_code)
        return
    with tempfile.TemporaryDirectory() as folder:
        exported = export(source, Path(folder) / name, name, checkpoint)
        yield ChatModel(str(exported), {}, model.trust_remote_code)


class ChatSession:
    """A conversation with a model.

    A model with a chat template sees the turns so far. One without sees each message as it is, alone.

    Invariants:
        ``turns`` alternates user and assistant, behind the system message if there is one.
        An answer joins the turns when it is complete; one that is interrupted leaves them as they were.
    """

    def __init__(
        self,
        model: ChatModel,
        system: str | None = None,
        temperature: float = 0.0,
        max_new_tokens: int = 128,
    ) -> None:
        """Load a model.

        Raises:
            RunError: its files can't be read, its layers don't run on the embedded engine, or a system
                message is given to a model without a chat template.
        """
        self.model = model
        try:
            self.engine = TransformersEngine(
                model.path, config=model.config, trust_remote_code=model.trust_remote_code
            )
            self.engine.load_pretrained()
        except (ValueError, OSError) as error:
            raise RunError(f"{model.path} can't be loaded: {error}") from error
        self.tokenizer = self.engine.tokenizer
        self.has_template = self.tokenizer.chat_template is not None
        if system and not self.has_template:
            law = f"{model.path} has no chat template, and a system message needs one"
            raise RunError(f"{law}\n  leave out --system")
        self.system = [{"role": "system", "content": system}] if system else []
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.turns: list[dict[str, str]] = []

    def about(self) -> str:
        """Return a line that says which model it is, and how it reads messages."""
        reading = "no chat template: it sees each message alone"
        if self.has_template:
            reading = "it sees the whole conversation; /new begins a new one"
        return f"{self.model.path}, {reading}. Ctrl-D ends."

    def forget(self) -> None:
        """Begin a new conversation."""
        self.turns = []

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer to a message in pieces, while it is generated.

        The oldest turns are left out where all of them with an answer would exceed the model's context.

        Raises:
            RunError: the message alone fills the model's context.
        """
        turns = [*self.turns, {"role": "user", "content": message}]
        prompt = self._prompt(turns)
        while len(turns) > 1 and self._room(prompt) < self.max_new_tokens:
            turns = turns[2:]
            prompt = self._prompt(turns)
        limit = min(self._room(prompt), self.max_new_tokens)
        if limit < 1:
            law = f"the message has {len(prompt)} tokens with its template"
            raise RunError(f"{law}, and the model's context is {self.engine.context}\n  shorten it")

        printed = ""
        text = ""
        for text in self._texts(prompt, limit):
            if not text.endswith(INCOMPLETE):
                yield text.removeprefix(printed)
                printed = text
        if text != printed:
            yield text.removeprefix(printed)
        if self.has_template:
            self.turns = [*turns, {"role": "assistant", "content": text}]

    def _prompt(self, turns: list[dict[str, str]]) -> list[int]:
        """Return the tokens that the model continues."""
        if not self.has_template:
            return list(self.tokenizer(turns[-1]["content"])["input_ids"])
        text = rendered(self.tokenizer, [*self.system, *turns], None)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _room(self, prompt: list[int]) -> int:
        """Return how many tokens an answer may have by the model's context."""
        if self.engine.context is None:
            return self.max_new_tokens
        return self.engine.context - len(prompt)

    def _texts(self, prompt: list[int], limit: int) -> Iterator[str]:
        """Yield the answer so far, after every few tokens."""
        sampling = Sampling(limit, self.temperature)
        seed = random.getrandbits(32)
        generated: list[int] = []
        while True:
            tokens = min(CHUNK_TOKENS, limit - len(generated))
            request = Request([*prompt, *generated], [seed], max_new_tokens=tokens, drawn=len(generated))
            ((generation,),) = self.engine.generate([request], sampling, stays=True)
            generated += generation.tokens
            yield self.tokenizer.decode(generated, skip_special_tokens=True)
            if generation.is_whole or len(generated) >= limit:
                return
