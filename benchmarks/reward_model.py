"""Make the reward model of the learning table: a sequence classifier that tells right sums from wrong ones.

    python benchmarks/reward_model.py runs/demo/models/policy runs/demo_sft/models/policy demo_files DIR

It has the layers of the model that the demo ends with, which say what comes next, and behind them two new
ones, which learn to compare that with what came. At each token of an answer it learns to say 1 where that is
right so far and 0 where it is not (squared error), on answers sampled from the model that the table's runs
start from, and on the right ones. Its reward is what it says at the last token. It sees training questions
alone; what it says of held-out ones is printed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

SAMPLES, EPOCHS, BATCH, RATE = 2, 8, 128, 2e-3
LAYERS = 2  # new ones
LONGEST = 8  # tokens of an answer, as in the table's runs


@dataclass(frozen=True)
class Answers:
    """Questions, all of ``asked`` tokens, and answers: ``[rows, tokens]``, padded on the right."""

    tokens: torch.Tensor  # int64
    right: torch.Tensor  # float32: whether an answer is right up to each of its tokens
    asked: int
    padding: int

    @property
    def answered(self) -> torch.Tensor:
        """bool ``[rows, tokens]``: the tokens of answers."""
        return (self.tokens != self.padding) & (torch.arange(self.tokens.shape[1]) >= self.asked)

    @property
    def last(self) -> torch.Tensor:
        """int64 ``[rows, 1]``: where each answer ends."""
        return (self.tokens != self.padding).sum(1, keepdim=True) - 1

    def take(self, rows: torch.Tensor) -> Answers:
        """Some of the rows."""
        return replace(self, tokens=self.tokens[rows], right=self.right[rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("begin", "sampled", "files", "folder"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    share = make(options.begin, options.sampled, options.files, options.folder)
    print(f"{options.folder}: on the right side of 0.5 for {share:.1%} of held-out answers")


def make(begin: Path, sampled: Path, files: Path, folder: Path, seed: int = 0) -> float:
    """Train it and write it.

    Args:
        begin: a folder of the language model whose layers it has; its tokenizer is the policy's.
        sampled: of the language model whose answers it is trained on.
        files: ``train.parquet`` and ``test.parquet``, with the columns ``question`` and ``answer``.
        folder: where the classifier is written, for ``reward.model``.
        seed: of the answers, the head and the order of training.

    Returns:
        The share of held-out answers that it puts on the right side of 0.5.
    """
    from transformers import AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(begin)
    train, test = (answers(sampled, tokenizer, files / f"{part}.parquet") for part in ("train", "test"))
    model = taller(begin)
    fit(model, train)
    with torch.no_grad():
        said, right = (every.gather(1, test.last) for every in (scores(model, test), test.right))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float(((said > 0.5) == (right > 0.5)).double().mean())


def answers(path: Path, tokenizer: Any, file: Path) -> Answers:
    """Of each question the right answer, and some that a language model samples."""
    from transformers import AutoModelForCausalLM

    rows = pyarrow.parquet.read_table(file).to_pylist()
    questions = torch.tensor([tokenizer(row["question"]).input_ids for row in rows])  # all of one length
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    given = model.generate(
        questions, max_new_tokens=LONGEST, do_sample=True, top_k=0, num_return_sequences=SAMPLES
    )
    texts = [row["question"] + row["answer"] + tokenizer.eos_token for row in rows]
    taught = tokenizer(texts, padding="max_length", max_length=given.shape[1], return_tensors="pt").input_ids
    tokens = torch.cat([given, taught])
    wanted = torch.cat([taught.repeat_interleave(SAMPLES, 0), taught])
    right = (tokens == wanted).float().cumprod(1)
    return Answers(tokens, right, questions.shape[1], tokenizer.pad_token_id)


def taller(begin: Path) -> Any:
    """A classifier with the layers of a language model, which stay as they are, and new ones behind them."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(begin)
    learnt, kinds = config.num_hidden_layers, config.layer_types
    config.num_labels, config.num_hidden_layers = 1, learnt + LAYERS
    config.layer_types = [*kinds, *kinds[-1:] * LAYERS]
    model = AutoModelForSequenceClassification.from_pretrained(begin, config=config, dtype=torch.float32)
    model.requires_grad_(False)
    for module in (*model.base_model.layers[learnt:], model.base_model.norm, model.score):
        module.requires_grad_(True)
    return model


def fit(model: Any, train: Answers) -> None:
    """Regress what it says at each token of an answer on 1 and 0."""
    steps = EPOCHS * -(-len(train.right) // BATCH)
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(train.right)).split(BATCH):
            part = train.take(rows)
            loss = (scores(model, part) - part.right)[part.answered].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def scores(model: Any, given: Answers) -> torch.Tensor:
    """What the head says behind each token, ``[rows, tokens]``; none sees the padding, which is behind it."""
    return model.score(model.base_model(input_ids=given.tokens).last_hidden_state)[..., 0]


if __name__ == "__main__":
    main()
