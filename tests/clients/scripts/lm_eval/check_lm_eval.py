"""lm-eval on small tasks: `local-completions`, with equal numbers for every `--batch_size`, and chats."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from typing import Any

from checks import Count, Target, run

QUESTIONS = [
    ("The capital of France is", ["Paris", "Berlin", "a fish", "seven"], 0),
    ("The opposite of hot is", ["warm", "cold", "green", "up"], 1),
    ("Two plus two is", ["nine", "five", "four", "blue"], 2),
    ("Grass is usually", ["red", "loud", "square", "green"], 3),
    ("A week has this number of days:", ["seven", "two", "ninety", "zero"], 0),
    ("Cats and dogs are", ["stones", "animals", "numbers", "planets"], 1),
]
# lm-eval reads tasks in YAML, and JSON is YAML.
_DATA = {"dataset_path": "json", "test_split": "test"}
_CHOICE = {
    "task": "quire_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
_GENERATE = {
    "task": "quire_generate",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


_TASKS = (_CHOICE, _GENERATE)
_COMPLETIONS, _CHAT = "local-completions", "local-chat-completions"


@cache
def _samples(
    target: Target, batch_size: int, model: str = _COMPLETIONS
) -> dict[str, list[dict[str, Any]]]:
    """What the server answered and how it was scored, by task and in the order of the data."""
    # A chat gives no probabilities of a given answer.
    tasks = _TASKS if model == _COMPLETIONS else (_GENERATE,)
    folder = target.work / f"{model}_{batch_size}"
    folder.mkdir()
    data = folder / "questions.jsonl"
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in tasks:
        text = json.dumps(_DATA | task | {"dataset_kwargs": {"data_files": {"test": str(data)}}})
        folder.joinpath(f"{task['task']}.yaml").write_text(text)
    path = "completions" if model == _COMPLETIONS else "chat/completions"
    arguments = f"model={target.model},base_url={target.api}/{path}"
    arguments += f",tokenizer={target.tokenizer},max_length=2048,num_concurrent=1,max_retries=1"
    command = ["lm-eval", "run", "--model", model, "--model_args", arguments]
    command += ["--tasks", ",".join(task["task"] for task in tasks), "--include_path", str(folder)]
    command += ["--apply_chat_template"] if model == _CHAT else []
    command += ["--batch_size", str(batch_size), "--log_samples", "--output_path", str(folder)]
    environment = os.environ | {"HF_HOME": str(folder / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return {
        task["task"]: [
            {name: row[name] for name in ("doc_id", "resps", *_scores(task))}
            for path in folder.rglob(f"samples_{task['task']}_*.jsonl")
            for row in map(json.loads, path.read_text().splitlines())
        ]
        for task in tasks
    }


def _scores(task: dict[str, Any]) -> list[str]:
    return [metric["metric"] for metric in task["metric_list"]]


def _equal(target: Target, task: str) -> Count:
    """Questions with the same answers and scores with batches of 4 as one by one."""
    alone, batched = _samples(target, 1)[task], _samples(target, 4)[task]
    num = sum(row in alone for row in batched)
    return Count(num, len(QUESTIONS), "questions")


def loglikelihood_batches(target: Target) -> Count:
    return _equal(target, _CHOICE["task"])


def generate_until_batches(target: Target) -> Count:
    return _equal(target, _GENERATE["task"])


def accuracy(target: Target) -> Count:
    """The model knows at least half of the answers; guesses find a quarter."""
    rows = _samples(target, 4)[_CHOICE["task"]]
    return Count(int(sum(row["acc"] for row in rows)), len(QUESTIONS) // 2, "questions")


def chat_generate_until(target: Target) -> Count:
    """Questions that a chat answers with a text."""
    rows = _samples(target, 1, _CHAT)[_GENERATE["task"]]
    return Count(sum(bool(row["resps"][0][0].strip()) for row in rows), len(QUESTIONS), "questions")


run([loglikelihood_batches, generate_until_batches, accuracy, chat_generate_until])
