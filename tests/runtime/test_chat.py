"""``rlgraph chat``: with the model of a run, before and after training, and with a model directory."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlgraph.cli.main import main
from rlgraph.errors import RunError
from rlgraph.runtime.chat import ChatModel, ChatSession, chat_model
from rlgraph.runtime.run import run_graph

MODEL = "demo_files/model"


@pytest.fixture(autouse=True)
def _in_demo(in_demo: None, demo_files: Path) -> None:
    Path("demo_files").symlink_to(demo_files / "demo_files")


@pytest.fixture
def run() -> Path:
    """A run of one large step, whose model answers otherwise than the one that it started from."""
    settings = ["models.policy.optimizer.lr=0.05", "eval.before=false", "eval.nodes.prompts.batch=4"]
    return run_graph("demo_sft", settings, 1, steps=1, run_dir=Path("run"), inline=True)


def chat(*arguments: str, typed: str = "12+34=\n") -> Result:
    return CliRunner().invoke(main, ["chat", *arguments], input=typed)


def greedy(folder: str, question: str, count: int) -> str:
    """What transformers makes of a question."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(question, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=count, do_sample=False)[0]
    return str(tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def test_answers_are_those_of_transformers(run: Path) -> None:
    after = chat("run", "--max-new-tokens", "20", typed="12+34=\n\n7+8=\n")
    assert after.exit_code == 0, after.output
    expected = [greedy("run/models/policy", question, 20) for question in ("12+34=", "7+8=")]
    assert after.output == "".join(f"{answer}\n" for answer in expected)
    before = chat("run", "--before", "--max-new-tokens", "20")
    assert before.output == f"{greedy(MODEL, '12+34=', 20)}\n"
    assert before.output == chat(MODEL, "--max-new-tokens", "20").output
    assert before.output not in after.output


def test_a_run_that_has_not_ended_answers_from_its_checkpoint(run: Path) -> None:
    ended = chat("run").output
    (run / "models").rename("elsewhere")
    assert chat("run").output == ended
    assert chat("run", "--checkpoint", "step-000001").output == ended


def test_no_model_is_an_error_with_a_remedy(run: Path) -> None:
    Path("empty").mkdir()
    result = chat("empty")
    assert result.exit_code == 1
    assert "empty is neither a run (no plan.json) nor a model (no config.json)" in result.output
    assert "empty is neither" not in chat(MODEL).output
    assert f"{MODEL} is not a run" in chat(MODEL, "--before").output
    assert "has no checkpoint step-000009" in chat("run", "--checkpoint", "step-000009").output
    assert "`polcy` is not a model that demo_sft trains" in chat("run", "--model", "polcy").output
    assert "leave out --checkpoint" in chat("run", "--before", "--checkpoint", "best").output
    assert "leave out --system" in chat(MODEL, "--system", "Be brief.").output
    (run / "models").rename("elsewhere")
    (run / "checkpoints").rename("lost")
    assert "run has no checkpoint yet" in chat("run").output


def test_a_message_that_is_too_long_is_refused_and_the_next_is_answered() -> None:
    result = chat(MODEL, typed=f"{'1' * 64}\n7+8=\n")
    assert result.exit_code == 0
    assert (
        "the message has 64 tokens with its template, and the model's context is 64\n  shorten it"
        in result.output
    )
    assert result.output.endswith(chat(MODEL, typed="7+8=\n").output)


def test_turns_go_on_where_the_model_has_a_chat_template(tool_files: Path) -> None:
    folder = tool_files / "demo_tool_files" / "model"
    talk = ChatSession(ChatModel(str(folder)), max_new_tokens=6)
    first, second = ("".join(talk.answer(message)) for message in ("12*34=", "and 5*6="))
    assert [turn["role"] for turn in talk.turns] == ["user", "assistant", "user", "assistant"]
    assert [turn["content"] for turn in talk.turns] == ["12*34=", first, "and 5*6=", second]
    talk.forget()
    assert "".join(talk.answer("12*34=")) == first


def test_the_oldest_turns_are_left_out_where_the_context_is_full(tool_files: Path) -> None:
    talk = ChatSession(ChatModel(str(tool_files / "demo_tool_files" / "model")), max_new_tokens=6)
    talk.engine.context = 60
    for number in range(8):
        "".join(talk.answer(f"{number}" * 12))
    assert 2 <= len(talk.turns) < 16
    assert talk.turns[-2]["content"] == "7" * 12
    with pytest.raises(RunError, match="shorten it"):
        "".join(talk.answer("1" * 80))


def test_an_answer_comes_in_pieces_that_add_up() -> None:
    with chat_model(Path(MODEL)) as model:
        talk = ChatSession(model, max_new_tokens=30)
        pieces = [*talk.answer("12+34=")]
    assert len(pieces) > 1
    assert "".join(pieces) == greedy(MODEL, "12+34=", 30)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Press Ctrl-C; once more if it came just before Python began to wait for a key, which loses it."""
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
            return


@pytest.mark.slow
@pytest.mark.parametrize("how", ["control-d", "control-c"])
def test_a_terminal_ends_it_cleanly(how: str) -> None:
    user, program = pty.openpty()
    command = [sys.executable, "-m", "rlgraph", "chat", MODEL]
    process = subprocess.Popen(command, stdin=program, stdout=program, stderr=program, start_new_session=True)
    os.close(program)
    shown = b""
    try:
        while b"you> " not in shown:
            shown += os.read(user, 1000)
        if how == "control-d":
            os.write(user, b"\x04")
        else:
            interrupt(process)
        assert process.wait(60) == 0
        with contextlib.suppress(OSError):  # the other end of the terminal is closed
            while True:
                shown += os.read(user, 1000)
    finally:
        process.kill()
        process.wait()
        os.close(user)
    assert b"Ctrl-D ends" in shown
    assert b"Traceback" not in shown
