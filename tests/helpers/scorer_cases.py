r"""verl's and TRL's own scorers: how each is called there, how a graph names it, and responses to score.

``tests/peers/ask_scorers.py`` asks verl and TRL for their scores, ``tests/peers/score_by_graph.py`` has
rlgraph score the same rows, and docs/from_verl.md and docs/from_trl.md list the scorers. Nothing of rlgraph,
verl or TRL is imported here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from grading_rows import ROWS

SANDBOX = "SANDBOX_URL"  # stands for the address of a server of programs, tests/helpers/sandbox_server.py
IN_VERL = "verl.utils.reward_score"
Row = dict[str, Any]


@dataclass(frozen=True)
class Scorer:
    """A scorer of a peer's.

    ``nodes`` are the attributes of nodes that score by it, each of which has to give the peer's scores.
    ``peer`` is the setting of the peer: for verl the manager of ``load_reward_manager`` (or of the older
    registry: ``legacy``), and a custom function; for TRL arguments of the function, or of what makes it.
    ``files`` are other names of its function, or of one around it, in files of verl's package or beside
    ask_scorers.py, which nodes with the first node's attributes score by, too.
    ``needs`` are packages that it imports and that neither the peer nor rlgraph requires. ``patience`` are
    arguments that let it wait for a machine that is busy.
    """

    name: str
    rows: tuple[Row, ...]
    nodes: tuple[dict[str, Any], ...]
    peer: dict[str, Any]
    needs: tuple[str, ...] = ()
    patience: dict[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()


def verl_row(response: str, truth: Any, source: str = "", extra: dict[str, Any] | None = None) -> Row:
    return {"response": response, "ground_truth": truth, "data_source": source, "extra_info": extra or {}}


def of(source: str, rows: list[tuple[str, Any]]) -> tuple[Row, ...]:
    return tuple(verl_row(response, truth, source) for response, truth in rows)


LONG = "We go on and on. " * 30
MATHS: list[tuple[str, Any]] = [
    *[(response, truth) for rows in ROWS.values() for response, truth, _ in rows[:3]],
    ("", "5"),
    (" \n", "5"),
    ("<think>It is 4.", "4"),
    ("<think>It is \\boxed{4}.</think>\nIt is \\boxed{5}.", "5"),
    ("<think>2 + 3</think> #### 5", "5"),
    ("#### 1,234", "1234"),
    ("#### -7.5", "-7.5"),
    ("#### $42", "42"),
    (LONG + "#### 42", "42"),
    ("#### 42 " + LONG, "42"),
    ("Answer: 7", "7"),
    (LONG + "Answer: \\boxed{7}", "7"),
    ("answer : $7$", "7"),
    ("\\boxed 5", "5"),
    ("\\fbox{5}", "5"),
    ("\\boxed{\\frac{1}{2}}", "\\frac12"),
    ("\\boxed{{1}", "1"),
    ("\\boxed{5}\\boxed{}", "5"),
    ("\N{GRINNING FACE} \\boxed{\N{GREEK SMALL LETTER PI}}", "\\pi"),
]
# what a data set may have in place of a text
ODD: list[tuple[str, Any]] = [
    ("#### 42 \\boxed{42} Answer: 42", truth) for truth in (42, 42.0, None, True, ["42"], {"a": "42"}, "")
]
TAGS = "<answer>no</answer>" * 11
SEARCHED: list[tuple[str, Any]] = [
    (f"<think>I know.</think><answer>{said}</answer>", {"target": target})
    for said in ("Paris", "the Paris!", "in Paris, France", "Lyon", "", "  paris ")
    for target in (["Paris", "City of Paris"], "paris")
] + [
    ("Paris", {"target": "Paris"}),
    ("", {"target": ["Paris"]}),
    ("<answer>Lyon</answer> no: <answer>Paris</answer>", {"target": ["Paris"]}),
    ("<answer>Paris", {"target": ["Paris"]}),
    (TAGS + "<answer>Paris</answer>", {"target": ["Paris"]}),
    ("<answer>5</answer>", {"target": ["5"]}),
    ("<answer>5</answer>", {"target": [5]}),
    ("<answer>Paris</answer>", {"target": []}),
    ("<answer>Paris</answer>", {"answers": ["Paris"]}),
    ("<answer>Paris</answer>", "Paris"),
    ("<answer>Paris</answer>", None),
]


def block(program: str) -> str:
    return f"It is this:\n```python\n{program}\n```\nDone."


DOUBLED = {"inputs": ["1\n", "2\n", "-3\n"], "outputs": ["2\n", "4\n", "-6\n"]}
ADDED = {"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}
ASSERTED = {"assert_case": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 1"]}
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b"
PROGRAMS: list[tuple[str, Any]] = [
    (block("print(int(input()) * 2)"), DOUBLED),
    (block("print(int(input()) * 2)"), json.dumps(DOUBLED)),
    (block("print(abs(int(input())) * 2)"), DOUBLED),
    (block("print(4)"), DOUBLED),
    (block("print(int(input()) * "), DOUBLED),
    (block("raise ValueError('no')"), DOUBLED),
    (block("import sys; sys.exit(1)"), DOUBLED),
    (block("no_such_name"), DOUBLED),
    (block("import no_such_module"), DOUBLED),
    ("print(int(input()) * 2)", DOUBLED),
    ("```\nprint(int(input()) * 2)\n```", DOUBLED),
    (block("print(1)") + block("print(int(input()) * 2)"), DOUBLED),
    ("", DOUBLED),
    ("I can't.", DOUBLED),
    (block("def add(a, b):\n    return a + b"), ADDED),
    (block(SOLUTION), ADDED),
    (block("def add(a, b):\n    return a - b"), ADDED),
    (block("print(int(input()) * 2)"), "no JSON"),
    (block("print(int(input()) * 2)"), {"inputs": ["1\n"]}),
    (block("print(int(input()) * 2)"), {"inputs": [], "outputs": []}),
]
ENDLESS = (block("while True: pass"), {"inputs": ["1\n"], "outputs": ["2\n"]})
CALL = '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}'
ASKED = f"<think>Look it up.</think>\n<tool_call>\n{CALL}\n</tool_call>"
TOLD = "<think>I know it.</think>\n<response>Rome.</response>"
CALLED: list[tuple[str, Any]] = [
    (said, truth)
    for truth in (ASKED, TOLD, f"{ASKED}\n<response>Rome.</response>", "<think>Well.</think>")
    for said in (
        ASKED,
        TOLD,
        ASKED.replace("Rome", "Oslo"),
        ASKED.replace(', "days": 2', ""),
        ASKED.replace("weather", "time"),
        ASKED.replace("}", ""),
        f"{ASKED}\n<response>Rome.</response>",
        f"<|im_start|>assistant\n{ASKED}<|im_end|>",
        "<think>Well.</think>",
        "",
    )
]
OF_MATH = "lighteval/MATH"
OF_CODE = "codeforces"
DEFAULT = f"{IN_VERL}:default_compute_score"
WRAPPED = "scorers_of_verl.py"  # beside ask_scorers.py: functions that verl's managers can call


def by_default(**arguments: Any) -> dict[str, Any]:
    return {"function": DEFAULT, **({"arguments": arguments} if arguments else {})}


VERL: tuple[Scorer, ...] = (
    Scorer(
        "gsm8k",
        of("openai/gsm8k", [*MATHS, *ODD]),
        ({"function": f"{IN_VERL}.gsm8k:compute_score"}, by_default(data_source="openai/gsm8k")),
        {"manager": "naive"},
    ),
    Scorer(
        "gsm8k, its arguments",
        of("openai/gsm8k", MATHS),
        (
            {
                "function": f"{IN_VERL}.gsm8k:compute_score",
                "arguments": {"method": "flexible", "format_score": 0.1, "score": 2.0},
            },
        ),
        {
            "manager": "naive",
            "path": WRAPPED,
            "name": "gsm8k_score",
            "reward_kwargs": {"method": "flexible", "format_score": 0.1, "score": 2.0},
        },
        files=(f"{WRAPPED}:gsm8k_score",),
    ),
    Scorer(
        "math_reward",
        of(OF_MATH, [*MATHS, *ODD]),
        ({"function": f"{IN_VERL}.math_reward:compute_score"}, by_default()),
        {"manager": "naive"},
    ),
    Scorer(
        "math_batch",
        of(OF_MATH, [*MATHS, *ODD]),
        ({"function": f"{IN_VERL}.math_batch:compute_score_batched"},),
        {"legacy": "batch", "path": f"pkg://{IN_VERL}.math_batch", "name": "compute_score_batched"},
        files=("verl/utils/reward_score/math_batch.py:compute_score_batched",),
    ),
    Scorer(
        "math_dapo",
        of("math_dapo", [*MATHS, *ODD]),
        ({"function": f"{IN_VERL}.math_dapo:compute_score"}, by_default()),
        {"manager": "dapo"},
    ),
    Scorer(
        "math_verify",
        of(OF_MATH, [*MATHS, *ODD]),
        ({"function": f"{IN_VERL}.math_verify:compute_score"},),
        {
            "manager": "naive",
            "path": WRAPPED,
            "name": "math_verify_score",
            "reward_kwargs": {"timeout": 300.0},
        },
        patience={"timeout": 300.0},  # it starts processes, and counts 0 where these take longer than 30 s
        files=(f"{WRAPPED}:math_verify_score", "verl/utils/reward_score/math_verify.py:compute_score"),
    ),
    Scorer(
        "prime_math",
        of("numina_olympiads", [*MATHS, *ODD]),
        ({"function": f"{IN_VERL}.prime_math:compute_score"}, by_default()),
        {"manager": "naive"},
        ("pylatexenc",),
    ),
    Scorer(
        "geo3k",
        of("hiyouga/geometry3k", [*MATHS, *ODD]),
        ({"function": f"{IN_VERL}.geo3k:compute_score"}, by_default()),
        {"manager": "naive"},
        ("mathruler",),
    ),
    Scorer(
        "search_r1_like_qa_em",
        of("searchR1_nq", SEARCHED),
        ({"function": f"{IN_VERL}.search_r1_like_qa_em:compute_score"}, by_default()),
        {"manager": "naive"},
    ),
    Scorer(
        "search_r1_like_qa_em, substrings",
        of("searchR1_nq", SEARCHED),
        ({"function": f"{IN_VERL}.search_r1_like_qa_em:compute_score_subem"},),
        {"manager": "naive", "path": WRAPPED, "name": "subem_score"},
    ),
    Scorer(
        "prime_code",
        of(OF_CODE, PROGRAMS),
        (
            {"function": f"{IN_VERL}.prime_code:compute_score", "arguments": {"continuous": True}},
            by_default(),
        ),
        {"manager": "naive"},
    ),
    Scorer(
        "sandbox_fusion",
        of(OF_CODE, [*PROGRAMS, ENDLESS, (block("def add(a, b):\n    return a + b"), ASSERTED)]),
        (
            {
                "function": f"{IN_VERL}.sandbox_fusion:compute_score",
                "arguments": {
                    "sandbox_fusion_url": SANDBOX,
                    "concurrent_semaphore": None,
                    "memory_limit_mb": 1024,
                    "continuous": True,
                },
            },
            by_default(sandbox_fusion_url=SANDBOX, memory_limit_mb=1024),
        ),
        {"manager": "naive", "sandbox": SANDBOX},
    ),
    Scorer(
        "rlla",
        of("rlla", CALLED),
        (
            {
                "function": f"{IN_VERL}.rlla:compute_score",
                "arguments": {"extra_info": {"experiment_name": "qwen"}},
            },
        ),
        {"manager": "gdpo", "path": f"pkg://{IN_VERL}.rlla", "name": "compute_score", "experiment": "qwen"},
    ),
    Scorer(
        "default_compute_score",
        (
            *of("openai/gsm8k", MATHS[-14:-10]),
            *of("HuggingFaceH4/MATH-500", MATHS[:4]),
            *of("aime_2025", MATHS[-9:-6]),
            *of("searchR1_hotpotqa", SEARCHED[:3]),
            *of("numina_cn_k12", MATHS[4:8]),
            *of("hiyouga/geometry3k", MATHS[8:12]),
            *of("apps", PROGRAMS[:3]),
            *of("of_no_scorer", MATHS[:1]),
            *of("", MATHS[:1]),
        ),
        (by_default(),),
        {"manager": "naive"},
        ("pylatexenc", "mathruler"),
        files=("verl/utils/reward_score/__init__.py:default_compute_score",),
    ),
)


def trl_row(response: str, solution: str) -> Row:
    """A row whose completion has a token for each byte of the response."""
    ids = [*response.encode()]
    return {"response": response, "solution": solution, "completion_ids": ids}


SOLVED = tuple(
    [trl_row(response, f"${truth}$") for response, truth in MATHS]
    + [
        trl_row("\\boxed{5}", "no formula"),
        trl_row("\\boxed{5}", ""),
        trl_row("<think>\\boxed{5}", "$5$"),
        trl_row("<think>\\boxed{4}</think> \\boxed{5}", "$5$"),
        trl_row("<think>\\boxed{4}</think> \\boxed{3} [done] \\boxed{5}", "$5$"),
        trl_row("<think></think>", "$5$"),
        trl_row("<think>a</think>b<think>c</think>", "$5$"),
        trl_row("\n<think>a</think>b", "$5$"),
        trl_row("a <think>b</think> c", "$5$"),
        trl_row("na " * 40, "$5$"),
    ]
)
TRL: tuple[Scorer, ...] = (
    Scorer(
        "accuracy_reward",
        SOLVED,
        ({"function": "trl.rewards:accuracy_reward", "columns": ["solution"]},),
        {},
    ),
    Scorer(
        "reasoning_accuracy_reward",
        SOLVED,
        ({"function": "trl.rewards:reasoning_accuracy_reward", "columns": ["solution"]},),
        {},
    ),
    Scorer(
        "reasoning_accuracy_reward, its arguments",
        SOLVED,
        (
            {
                "function": "trl.rewards:reasoning_accuracy_reward",
                "columns": ["solution"],
                "arguments": {"reasoning_delimiters": ["</think>", "[done]"]},
            },
        ),
        {"arguments": {"reasoning_delimiters": ["</think>", "[done]"]}},
    ),
    Scorer("think_format_reward", SOLVED, ({"function": "trl.rewards:think_format_reward"},), {}),
    *(
        Scorer(
            name,
            SOLVED,
            ({"function": f"trl.rewards:{name}", "factory": factory} | columns,),
            {"factory": factory},
        )
        for name, factory, columns in (
            ("get_cosine_scaled_reward", {"max_len": 60}, {"columns": ["solution"]}),
            ("get_repetition_penalty_reward", {"ngram_size": 2, "max_penalty": -0.5}, {}),
            ("get_soft_overlong_punishment", {"max_completion_len": 60, "soft_punish_cache": 40}, {}),
        )
    ),
)
