"""Derives a model's tensors and bytes from its ``config.json``: without weights, the hub or torch."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, get_args

from rlgraph.costs.limits import buckets
from rlgraph.costs.models.config import Config
from rlgraph.costs.models.fields import TEXTS, Family
from rlgraph.errors import GraphError, Source, fail, nearest
from rlgraph.files import copy_of
from rlgraph.syntax.source import OPEN, Tree, parse, read
from rlgraph.syntax.validate import read_record
from rlgraph.variables import with_values

WITHOUT = "a plan without --cluster needs no sizes"
CARDS = Path(__file__).parent / "models/cards.yaml"
# same shapes, of a mixture of pictures and text those of its text, as the model without these words and dates
TWINS = re.compile(r"-(Instruct|Base|Thinking|Think|SFT|DPO|Zero|it|pt|1M)(?=-|$)", re.I)
DATES = re.compile(r"-\d{4}(?=-|$)")
KIN = re.compile(r"(?<=2\.5-)(Math-|Coder-|VL-)|(?<=Qwen3-)VL-")
SEEING = re.compile(r"Qwen(2\.5|3)-VL-")  # with a longer context than the model of their text
# names on the hub of vision-language models that have a size card, the card of their text
VISION = re.compile(r"Qwen(2\.5|3)-VL-|Mistral-Small-3\.[12]-")
ON_HUB = re.compile(r"(?=.{1,96}$)[\w.-]+(/[\w.-]+)?")  # names that a model on the hub may have


# A decoder layer launches about 11 kernels as engines fuse them, a mixture's 16: a router, the choice, sorted
# rows, two products, a gate and a sum in place of two products and a gate.
ROUTED_LAYER = 1.5  # in layers without experts
LEAST_TILE = (
    16  # rows in a tile of an expert's products, where a step has no more rows than there are experts
)


class Size:
    """Counts of one model. ``head`` is ``lm``, or ``value`` for one number per token (a bias with it)."""

    divided = 1  # devices that divide its experts, each of which gathers its own alone

    def __init__(self, config: Config, head: str = "lm") -> None:
        self.config, self.head = config, head
        self._shards: dict[int, int] = {}  # the keys are numbers of devices
        self._buckets: dict[tuple[int, bool], int] = {}
        self.embedding = config.vocab_size * config.hidden_size
        # layers are alike that have the same window, and a mixture or none
        kinds = [(config.window(i), config.is_sparse(i)) for i in range(config.num_hidden_layers)]
        self.windows = Counter(window for window, _ in kinds)
        self.unlike: dict[int, int] = {}  # a layer of each kind, and how many there are
        parameters: dict[tuple[int | None, bool], tuple[int, int]] = {}  # kind -> all, and the active ones
        for kind, count in Counter(kinds).items():
            index = kinds.index(kind)
            self.unlike[index] = count
            parameters[kind] = config.layer(index), config.layer(index, active=True)
        self.layers = [parameters[kind][0] for kind in kinds]
        self.active_layers = [parameters[kind][1] for kind in kinds]

    @property
    def head_tensors(self) -> list[tuple[int, int]]:
        """Return the tensors of the head; none where it is tied to the embedding. See ``Config.tensors``."""
        vocabulary, hidden = self.config.vocab_size, self.config.hidden_size
        if self.head == "value":
            return [(1, hidden), (1, 1)]
        if self.config.tie_word_embeddings:
            return []
        return [(vocabulary, hidden)]

    @property
    def root_tensors(self) -> list[tuple[int, int]]:
        """Return the tensors of embedding, last norm and head. See ``Config.tensors``."""
        hidden = self.config.hidden_size
        return [(self.config.vocab_size, hidden), (hidden, 1), *self.head_tensors]

    @cached_property
    def tensors(self) -> tuple[tuple[int, int], ...]:
        """Return the tensors of the whole model, in its order. See ``Config.tensors``."""
        embedding, *norm_and_head = self.root_tensors
        tensors = [embedding]
        for index in range(self.config.num_hidden_layers):
            tensors += self.config.tensors(index)
        return (*tensors, *norm_and_head)

    @cached_property
    def numbers(self) -> list[int]:
        """Return the parameters of each tensor."""
        return [rows * numbers for rows, numbers in self.tensors]

    def on_device(self, devices: int) -> int:
        """Return how many parameters each of so many devices holds in shards: whole rows of each tensor."""
        if devices not in self._shards:  # a search asks this millions of times
            self._shards[devices] = padded(self.tensors, devices) // devices
        return self._shards[devices]

    def buckets(self, width: int, fused: bool = True) -> int:
        """Return how many buckets its weights fill with ``width`` bytes per number.

        ``fused``: a layer's experts are two tensors, as they are gathered, not many, as they are sent.
        """
        if (width, fused) in self._buckets:
            return self._buckets[width, fused]
        layer = self.config.tensors if fused else self.config.weights
        embedding, *norm_and_head = self.root_tensors
        tensors = [embedding]
        for index in range(self.config.num_hidden_layers):
            tensors += layer(index)
        tensors += norm_and_head
        filled = [*buckets(tensors, lambda tensor: tensor[0] * tensor[1] * width)]
        self._buckets[width, fused] = len(filled)
        return len(filled)

    @property
    def parameters(self) -> int:
        """Return how many parameters it has, tied ones once."""
        return self.on_device(1)

    @property
    def _multiplied_weights(self) -> int:
        """Return how many weights a token multiplies with: of experts those that it chose, and the head."""
        head = self.embedding  # tied or not, a head has its shape
        if self.head == "value":
            head = padded(self.head_tensors, 1)
        return sum(self.active_layers) + head

    @cached_property
    def multiplied(self) -> int:
        """Return N of ``2 N FLOPs per token``: what one token multiplies with, without the embedding.

        Those are weights, the keys and values in windows, taken as full, and states of linear attention: with
        its state a token multiplies three times, to read it, to correct it and to ask it.
        """
        config = self.config
        window_tokens = 0
        for window, count in self.windows.items():
            if window is not None:
                window_tokens += window * count
        in_windows = (config.queries + config.outputs) * window_tokens
        return self._multiplied_weights + in_windows + 3 * config.state * self.windows[0]

    @cached_property
    def chosen(self) -> float:
        """Return the parameters of the experts that one token chooses, in all layers."""
        chosen = self.config.num_experts_per_tok
        idle = sum(self.layers) - sum(self.active_layers)
        if not idle:
            return 0.0
        return idle * chosen / (self.config.experts - chosen)

    def touched(self, rows: float) -> float:
        """Return the parameters that a decode step of ``rows`` tokens reads: of experts, the chosen ones."""
        total, active = sum(self.layers), sum(self.active_layers)
        if total == active:
            return self._multiplied_weights
        chosen = self.config.num_experts_per_tok / self.config.experts
        experts = (total - active) / (1 - chosen)
        idle: float = (1 - chosen) ** rows
        return self._multiplied_weights - experts * chosen + experts * (1 - idle)

    def tiled(self, rows: float, tile: float, expert_tile: float) -> float:
        """Return the multiplications of a decode step of so many rows, empty rows of tiles included.

        Kernels multiply weights with whole tiles of rows. Each expert that a row chose has tiles of its own:
        one at least, and half of the last one is empty. Keys, values and states have no tiles.

        Example:
            >>> eight = size_of("Qwen/Qwen3-8B")
            >>> eight.tiled(1, 64, 16) == eight.tiled(64, 64, 16) == 64 * eight.multiplied
            True
        """
        others = (self.multiplied - self._multiplied_weights) * rows
        products = (self._multiplied_weights - self.chosen) * max(rows, tile) + others
        if not self.chosen:
            return products
        if rows <= self.config.experts:
            expert_tile = min(expert_tile, LEAST_TILE)
        share = self.config.num_experts_per_tok / self.config.experts
        touched: float = 1 - (1 - share) ** rows  # the share of the experts that some row chose
        rows_per_expert = share * rows / touched
        experts = self.chosen / share
        return products + experts * touched * max(expert_tile, rows_per_expert + expert_tile / 2)

    @cached_property
    def launched_layers(self) -> float:
        """Return its layers, counted by the kernels that they launch."""
        sparse = sum(count for index, count in self.unlike.items() if self.config.is_sparse(index))
        return self.config.num_hidden_layers + (ROUTED_LAYER - 1) * sparse

    @cached_property
    def activations(self) -> int:
        """Return the numbers per token that the layers of a forward pass read and write between their
        products, as kernels that fuse what follows one another do."""
        return sum(count * self.config.passing(index) for index, count in self.unlike.items())

    @property
    def vocabulary(self) -> int:
        """Return how many numbers come out for a token."""
        return self.config.vocab_size if self.head == "lm" else 1

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of keys and values of one token, in numbers of ``width`` bytes.

        Windows are taken as not yet full. Latent attention keeps one vector for all heads.

        Example:
            >>> size_of("Qwen/Qwen2.5-7B").kv_bytes(2) / 2**10
            56.0
        """
        return (self.windows.total() - self.windows[0]) * self.config.cached * width

    def state_bytes(self, width: int) -> int:
        """Return the bytes that layers of linear attention have for a row, however long it is: states in
        float32, and the inputs of their convolutions in numbers of ``width`` bytes."""
        config = self.config
        return self.windows[0] * (4 * config.state + width * config.convolved * config.linear_conv_kernel_dim)

    def cache_bytes(self, width: int, tokens: float) -> float:
        """Return the bytes that a row of so many tokens takes of a cache.

        A layer with a window keeps what the next token sees: one token less than the window has.
        """
        cached_tokens: float = 0
        for window, count in self.windows.items():
            if window is None:
                cached_tokens += count * tokens
            elif window > 0:
                cached_tokens += count * min(tokens, window - 1)
        return cached_tokens * (self.config.cached * width) + self.state_bytes(width)

    def attention_flops(self, length: float) -> float:
        """Return the forward FLOPs of causal attention to all tokens in one sequence: s^2 for each number of
        queries and of what comes out. Attention in windows is of ``multiplied``."""
        return length**2 * (self.config.queries + self.config.outputs) * self.windows[None]

    def forward_flops(self, tokens: float, squares: float) -> float:
        """Return the FLOPs that so many tokens need in a forward pass: 2 N each, and causal attention by the
        sum of their rows' squared lengths."""
        return 2 * self.multiplied * tokens + self.attention_flops(1) * squares

    @cached_property
    def asked(self) -> int:
        """Return what a generated token multiplies with for each token before it, beside ``multiplied``."""
        return self.windows[None] * self.config.asked

    @property
    def attention_share(self) -> float:
        """Return the work of attention for a token and a column that it sees, over that of the weights."""
        return self.attention_flops(1) / self.multiplied


def padded(tensors: Iterable[tuple[int, int]], devices: int) -> int:
    """Return the numbers of tensors (``Config.tensors``) whose rows are padded to as many per device.

    Example:
        128 experts over 1,024 devices: 7 of 8 devices hold padding alone, and what is gathered is 8 times as
        large.

        >>> padded([(128, 10)], 1024) // (128 * 10)
        8
    """
    return sum(-(-rows // devices) * devices * numbers for rows, numbers in tensors)


def size_of(path: str, head: str = "lm", changed: Mapping[str, Any] | None = None) -> Size:
    """Return the size of a model: of a folder with a ``config.json``, or of a card by its hub name.

    Of a URL it is known once a run has copied the model to this machine.

    ``changed`` are fields of the configuration that are others (``models.NAME.config``).

    Raises:
        GraphError: neither is there, or the configuration is of a kind that is not covered.
    """
    model = with_values(path).removeprefix("file://")
    fields = [(key, value) for key, value in (changed or {}).items() if key in Config.model_fields]
    folder = copy_of(model) if "://" in model else Path(model)
    file = folder / "config.json"
    if file.is_file():
        return _size_of_file(file, head, fields)
    twin = TWINS.sub("", model)
    for name in (model, twin, KIN.sub("", twin), DATES.sub("", twin)):
        card = _card(name)
        if card is None:
            continue
        if SEEING.search(model):
            fields.insert(0, ("max_position_embeddings", None))
        card_name = name if card.is_map else str(card.value)
        return _size(card_name, None, 0, head, tuple(fields))
    downloaded = _downloaded(model)
    if downloaded:
        return _size_of_file(downloaded, head, fields)
    raise _unknown(path)


def is_vision_language(path: str) -> bool:
    """Return whether a model reads images beside text and transformers has no class for its text alone.

    The files of a folder, or of a model in this machine's cache of the hub, say so by ``model_type``, and
    names with a size card by themselves. Of any other path it is not known, and the answer is no.

    Example:
        >>> is_vision_language("Qwen/Qwen2.5-VL-7B-Instruct"), is_vision_language("Qwen/Qwen2.5-7B-Instruct")
        (True, False)
    """
    model = with_values(path).removeprefix("file://")
    folder = copy_of(model) if "://" in model else Path(model)
    file: Path | None = folder / "config.json"
    if not folder.is_dir():
        file = _downloaded(model)
        is_on_hub = ON_HUB.fullmatch(model) is not None
        if is_on_hub and VISION.search(model):
            return True
    if file is None or not file.is_file():
        return False
    kind = read(file).items.get("model_type")
    return kind is not None and kind.plain() in TEXTS


def _size_of_file(file: Path, head: str, fields: Iterable[tuple[str, Any]]) -> Size:
    return _size(str(file), file.resolve(), file.stat().st_mtime_ns, head, tuple(fields))


def _downloaded(name: str) -> Path | None:
    """Return the ``config.json`` of a model on the hub that lies in this machine's cache of it."""
    if not ON_HUB.fullmatch(name):
        return None
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or Path(caches) / "huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"
    folder = Path(os.path.expanduser(hub)) / f"models--{name.replace('/', '--')}"
    main = folder / "refs/main"
    if not main.is_file():
        return None
    commit = main.read_text(encoding="utf-8", errors="replace").strip()
    file = folder / "snapshots" / commit / "config.json"
    return file if file.is_file() else None


@lru_cache(maxsize=64)  # a run asks with every layout of rows
def _size(name: str, file: Path | None, _time: int, head: str, fields: tuple[tuple[str, Any], ...]) -> Size:
    tree = read(Path(name)) if file else _card(name)
    assert tree, f"a model without a card: {name}"
    return Size(_checked(tree, name, dict(fields)), head)


def _checked(tree: Tree, name: str, changed: dict[str, Any]) -> Config:
    kind = tree.items.get("model_type")
    family = str(kind.plain()) if kind else ""
    if family in TEXTS:
        tree = _text_config(tree, family)
    elif kind and family not in get_args(Family):
        law = f"{family}: sizes of models of this type are not known, so memory and times can't be predicted"
        remedy = f"{WITHOUT}, or name a model of one of these types that has about its size"
        raise fail("unknown-size", law, kind.mark, get_args(Family), remedy)
    changes = {key: Tree(value, tree.mark) for key, value in changed.items()}
    return read_record(Config, Tree({**tree.items, **changes}, tree.mark), name)


def _text_config(tree: Tree, family: str) -> Tree:
    """Return the fields of a model's text.

    Some models have these in a section, except for whether embedding and head are one.
    """
    fields = {**tree.items.get("text_config", tree).items, "model_type": Tree(TEXTS[family], tree.mark)}
    tied = tree.items.get("tie_word_embeddings")
    if tied:
        fields["tie_word_embeddings"] = tied
    return Tree(fields, tree.mark)


@cache
def _card(name: str) -> Tree | None:
    """Return a model's card, or the name of another card; only its line is parsed, of a hundred."""
    line = _card_lines().get(name)
    return parse(Source(str(CARDS), line)).items[name] if line else None


@cache
def _card_lines() -> Mapping[str, str]:
    lines = CARDS.read_text(encoding="utf-8").splitlines()
    return {line.partition(": ")[0]: line for line in lines if not line.startswith("#")}


def known_models() -> tuple[str, ...]:
    """Return the names that have a card, or share that of another."""
    return tuple(_card_lines())


def _unknown(path: str) -> GraphError:
    if path == OPEN:
        law, remedy = "the model's path is still open", "give it as models.NAME.path=..."
        return fail("unknown-size", law, None, (), remedy)
    if "://" in path:
        law = f"the size of `{path}` is not known: only a run copies what is at a URL, and none has here"
        remedy = f"copy the model's `config.json` into a folder and plan with its path; {WITHOUT}"
        return fail("unknown-size", law, None, (), remedy)
    law = (
        f"the size of `{path}` is not known: it is not a folder with a `config.json`, not a shipped card, "
        "and not in a cache of the hub on this machine"
    )
    remedy = "put the model's `config.json` into a folder and give its path"
    if ON_HUB.fullmatch(path):
        remedy += f", or fetch it into the cache: hf download {path} config.json"
    remedy += f"; {WITHOUT}"
    near = nearest(path, known_models())
    if near:
        remedy += f"\n  {near}"
    return fail("unknown-size", law, None, (), remedy)
