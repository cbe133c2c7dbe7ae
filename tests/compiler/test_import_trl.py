"""`rlgraph import trl`: scripts are read where they can be, the rest is said; the table is TRL 1.16.0's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imported_graph import graph_of
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.importing.importer import Imported
from rlgraph.importing.script import ARGUMENTS
from rlgraph.importing.table import table_of
from rlgraph.importing.trl import import_trl

SETTINGS = json.loads((Path(__file__).parents[1] / "peers/recorded/trl_settings.json").read_text())
KINDS = [*SETTINGS["defaults"]]
GRPO = "from trl import GRPOConfig, GRPOTrainer\n"
REST = "GRPOTrainer(model='m', reward_funcs=f, args=args, train_dataset=train_dataset)\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, *overrides: str, trainer: str | None = None) -> Imported:
    Path("train.py").write_text(text)
    return import_trl(Path("train.py"), overrides, trainer=trainer)


def nodes(imported: Imported) -> dict[str, Any]:
    """The nodes of the composed graph, in which `check` finds no problem."""
    return dict(graph_of(imported)["nodes"])


def said(imported: Imported) -> list[str]:
    return [o.text for o in imported.outcomes if o.text.startswith("these settings are not read")]


# where settings stand -> the learning rate, or None where it has to be said that they are not read
READ: dict[str, tuple[str, float | None]] = {
    "keywords": ("args = GRPOConfig(learning_rate=3e-6)\n", 3e-6),
    "an attribute": ("args = GRPOConfig()\nargs.learning_rate = 3e-6\n", 3e-6),
    "an attribute that takes over": (
        "args = GRPOConfig(learning_rate=1.0)\nargs.learning_rate = 3e-6\n",
        3e-6,
    ),
    "a dictionary": ("cfg = {'learning_rate': 3e-6}\nargs = GRPOConfig(**cfg)\n", 3e-6),
    "a dict()": ("cfg = dict(learning_rate=3e-6)\nargs = GRPOConfig(**cfg)\n", 3e-6),
    "a literal dictionary": ("args = GRPOConfig(**{'learning_rate': 3e-6})\n", 3e-6),
    "a partial": ("make = partial(GRPOConfig, learning_rate=3e-6)\nargs = make(output_dir='o')\n", 3e-6),
    "another name": ("Config = GRPOConfig\nargs = Config(learning_rate=3e-6)\n", 3e-6),
    "a name that is assigned once": ("RATE = 3e-6\nargs = GRPOConfig(learning_rate=RATE)\n", 3e-6),
    "a condition": ("args = GRPOConfig()\nif fast:\n    args.learning_rate = 3e-6\n", None),
    "setattr": ("args = GRPOConfig()\nsetattr(args, 'learning_rate', 3e-6)\n", None),
    "a method": ("args = GRPOConfig()\nargs.set_optimizer(learning_rate=3e-6)\n", None),
    "a changed dictionary": ("cfg = {}\ncfg['learning_rate'] = 3e-6\nargs = GRPOConfig(**cfg)\n", None),
    "a dictionary of elsewhere": ("cfg = load()\nargs = GRPOConfig(**cfg)\n", None),
    "a parser": ("args, model_args = TrlParser((GRPOConfig, M)).parse_args_and_config()\n", None),
    "a function": ("args = make_args()\n", None),
    "replace": ("args = dataclasses.replace(GRPOConfig(), learning_rate=3e-6)\n", None),
    "two assignments": ("args = GRPOConfig()\nif fast:\n    args = GRPOConfig(learning_rate=3e-6)\n", None),
    "an augmented assignment": ("args = GRPOConfig(learning_rate=1e-6)\nargs.learning_rate *= 3\n", None),
}


@pytest.mark.parametrize("where", READ)
def test_settings_are_read_or_it_is_said_that_they_are_not(where: str) -> None:
    text, rate = READ[where]
    imported = read(GRPO + text + REST)
    nodes(imported)
    assert bool(said(imported)) == (rate is None)
    if rate is not None:
        assert compose("out.yaml").plain()["models"]["policy"]["optimizer"]["lr"] == rate
    else:
        assert "these settings are not read" in imported.graph()


def test_what_is_not_read_names_where_it_stands() -> None:
    (text,) = said(read(GRPO + READ["a condition"][0] + REST))
    assert "line 4, `args.learning_rate = 3e-06`" in text


def test_a_name_that_is_assigned_twice_is_no_value() -> None:
    text = "N = 4\nif big:\n    N = 8\nargs = GRPOConfig(num_generations=N)\n"
    imported = read(GRPO + text + REST)
    (outcome,) = (o for o in imported.outcomes if o.key == "num_generations")
    assert outcome.kind == "hand"


TWO = "SFTTrainer(model='m', args=SFTConfig(max_length=77, learning_rate=0.5))\n"
TWO += "GRPOTrainer('m', f, GRPOConfig(num_generations=4))\n"


def test_several_trainers_are_not_merged() -> None:
    with pytest.raises(GraphError) as error:
        read(TWO)
    assert "SFTTrainer (line 1), GRPOTrainer (line 2)" in str(error.value)
    assert "--trainer sft" in str(error.value)
    grpo = read(TWO, trainer="grpo")
    assert nodes(grpo)["rollout"]["n"] == 4
    assert not any(o.key == "max_length" for o in grpo.outcomes)
    assert nodes(read(TWO, trainer="sft"))["examples"]["max_tokens"] == 77
    with pytest.raises(GraphError, match="but no DPOTrainer"):
        read(TWO, trainer="dpo")
    with pytest.raises(GraphError, match="keep one of them"):
        read("DPOTrainer(m)\nDPOTrainer(n)\n")


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_with_the_names_of_their_values(kind: str) -> None:
    names = ("model", "train_dataset", "eval_dataset", "processing_class", "ref_model", "output_dir")
    name = {"reward": "Reward", "distillation": "Distillation"}.get(kind, kind.upper())
    given = ", ".join(f"{each}={each}" for each in names)
    imported = read(f"{name}Trainer(args={name}Config(max_steps=10, output_dir=output_dir), {given})\n")
    nodes(imported)
    assert {o.key for o in imported.outcomes} >= {"model", "train_dataset", "eval_dataset"}


def test_arguments_by_their_places_are_those_of_trl() -> None:
    for kind, names in ARGUMENTS.items():
        assert [*names] == SETTINGS["arguments"][kind][: len(names)]


def test_epochs_that_are_no_number_leave_the_iterations() -> None:
    imported = read(GRPO + "args = GRPOConfig(num_train_epochs=cli.epochs)\n" + REST)
    nodes(imported)
    assert compose("out.yaml").plain()["schedule"]["iterations"] > 0


@pytest.mark.parametrize(
    "given", ["[..., f]", "[lambda completions: 1.0]", "[partial(f, x=1), f, f]", "[rewards]"]
)
def test_rewards_that_are_no_names_have_names(given: str) -> None:
    imported = read(f"GRPOTrainer(model='m', reward_funcs={given}, args=GRPOConfig())\n")
    found = nodes(imported)
    assert all(found)
    assert any(node.get("op") == "reward.trl" for node in found.values())


EXPRESSIONS = (
    ("GRPO", "reward_weights=[a, 2 * b]"),
    ("GRPO", "delta=d, epsilon_high=high, beta=b, loss_type=kind, max_completion_length=n"),
    ("GRPO", "scale_rewards=scale, top_entropy_quantile=q, importance_sampling_level=level, use_vllm=v"),
    ("GRPO", "num_generations=n, steps_per_generation=s, per_device_train_batch_size=size"),
    ("DPO", "loss_type=kinds, loss_weights=weights"),
    ("DPO", "loss_type=['ipo', kind], loss_weights=[1.0, w], rpo_alpha=r"),
    ("CPO", "alpha=a, cpo_alpha=c, loss_type=kind, simpo_gamma=g"),
    ("KTO", "loss_type=kind, beta=b"),
    ("SFT", "learning_rate=rate, max_steps=n, run_name=name"),
)


@pytest.mark.parametrize(("name", "given"), EXPRESSIONS)
def test_expressions_need_a_hand_and_the_graph_checks(name: str, given: str) -> None:
    text = f"peft = LoraConfig(r=rank, target_modules=[*modules])\nargs = {name}Config({given})\n"
    text += "functions = [f, g]\n" if name == "GRPO" else ""
    more = ", reward_funcs=functions" if name == "GRPO" else ""
    imported = read(text + f"{name}Trainer(model='m', args=args, peft_config=peft{more})\n")
    nodes(imported)
    hands = {o.key for o in imported.outcomes if o.kind == "hand"}
    keys = {each.partition("=")[0].strip() for each in given.split(", ") if "=" in each}
    off = {"simpo_gamma"}  # of a loss that is not known
    idle = {"run_name"}  # the graph is called by its file
    assert keys - hands <= off | idle


def test_a_model_that_is_loaded_has_its_name() -> None:
    text = "model = AutoModelForCausalLM.from_pretrained('org/model', dtype='bfloat16')\n"
    imported = read(text + "SFTTrainer(model=model, args=SFTConfig())\n")
    nodes(imported)
    assert compose("out.yaml").plain()["models"]["policy"]["path"] == "org/model"


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_of_trl_is_known_with_its_default(kind: str) -> None:
    table = table_of("trl", kind)
    for name, default in SETTINGS["defaults"][kind].items():
        row = table.row(table.renamed(name))
        assert row is not None, f"{kind}: {name}"
        old_spelling = table.renamed(name) != name
        if "default" in row.entry and not old_spelling and default is not None:
            assert row.default == default, f"{kind}: {name}"
        if row.to and not old_spelling and default not in (None, False, "auto") and name != "seed":
            assert "default" in row.entry or name in ("max_length",), f"{kind}: {name} has a default"


def test_every_setting_of_a_model_is_known() -> None:
    table = table_of("trl", "grpo")
    assert [name for name in SETTINGS["model"] if table.row(table.renamed(name)) is None] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_becomes_a_graph_that_checks(kind: str) -> None:
    name = {"reward": "Reward", "distillation": "Distillation"}.get(kind, kind.upper())
    imported = read(f"{name}Trainer(model='m', args={name}Config(max_steps=10))\n")
    nodes(imported)
    models = compose("out.yaml").plain()["models"]
    trained = models["reward" if kind == "reward" else "policy"]
    assert (trained["path"], trained["optimizer"]["lr"]) == ("m", SETTINGS["defaults"][kind]["learning_rate"])


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("kto", {"loss_type": "apo_zero_unpaired"}, {"drift": False}),
        ("kto", {"undesirable_weight": 2.0}, {"weight_undesirable": 2.0}),
        ("dpo", {"loss_type": "ipo"}, {"losses": {"ipo": {"kind": "ipo"}}}),
        ("dpo", {"f_divergence_type": "js_divergence"}, {"divergence": "js"}),
        ("dpo", {"ld_alpha": 0.5}, {"tail": 0.5}),
        ("dpo", {"use_weighting": True}, {"weighting": True}),
        ("dpo", {"reference_free": True}, {"reference": False}),
        ("dpo", {"rpo_alpha": 0.5}, {"weights": {"sigmoid": 1.0, "sft": 0.5}}),
        ("orpo", {"beta": 0.2}, {"coef": 0.2}),
        ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0}, {"reference": False}),
    ],
)
def test_losses_of_preferences(kind: str, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    imported = read(f"{kind.upper()}Trainer(model='m', args={kind.upper()}Config({given}, max_steps=10))\n")
    preference = nodes(imported)["preference"]
    assert preference.items() >= expected.items()


def test_a_loss_of_pairs_that_is_not_known_needs_a_hand() -> None:
    imported = read("DPOTrainer(model='m', args=DPOConfig(loss_type='new_pair'))\n")
    nodes(imported)
    (outcome,) = (o for o in imported.outcomes if o.key == "loss_type")
    assert outcome.kind == "hand"
