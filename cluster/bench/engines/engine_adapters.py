"""Adapters for the engines that `quire bench` runs, all with the same two methods.

`engine_process.EngineProcess` runs this file as a program (`python engine_adapters.py NAME SPEC`) with the Python of
the engine's own environment, which need not have Quire. The file therefore imports only the standard library; an
adapter imports its engine when it is created.

    generate(prompts, max_tokens)   token ids in; exactly max_tokens greedy ids out for each prompt
    close()
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import http.client
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import urllib.parse
from typing import Any, Protocol


class BatchEngine(Protocol):
    """An engine with a model loaded."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]: ...

    def close(self) -> None: ...


class QuireEngine:
    """Quire. Options: fields of `quire.replica.config.EngineArgs`."""

    def __init__(self, model: str, dtype: str, threads: int, options: dict[str, Any]):
        from quire.protos.sampling_params import SamplingParams
        from quire.replica.engine import Engine

        size = {} if "num_blocks" in options else {"kv_cache_gib": 4.0}
        chosen = {"max_model_len": 2048, **size, "num_threads": threads, **options}
        self._engine = Engine(model=model, dtype=dtype, **chosen)
        self._params = SamplingParams

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = self._params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        outputs = self._engine.generate(prompts, params, progress=False)
        return [output.token_ids for output in outputs]

    def close(self) -> None:
        self._engine.close()


class TransformersBatch:
    """transformers' continuous batching. Options: fields of its `ContinuousBatchingConfig`.

    On the CPU the defaults of transformers spend most of the memory on a dense mask, so the adapter sets the cache's
    size and the tokens of a step. The manager stays alive between calls, because starting one takes about half a
    second; Quire's engine stays alive too.
    """

    def __init__(self, model: str, dtype: str, threads: int, options: dict[str, Any]):
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        chosen = {"num_blocks": 84, "max_batch_tokens": 2048, **options}
        self._config = ContinuousBatchingConfig(**chosen)
        self._generation = GenerationConfig

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        found = self._model.generate_batch(
            inputs=prompts,
            generation_config=self._generation(
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
                bos_token_id=0,
            ),
            continuous_batching_config=self._config,
            progress_bar=False,
            persistent_manager=True,
            max_new_tokens=max_tokens,  # the manager keeps its first configuration
        )
        keys = sorted(found, key=lambda name: int(str(name).rpartition("_")[2]))
        return [list(found[key].generated_tokens) for key in keys]

    def close(self) -> None:
        pass


class TransformersGenerate:
    """transformers' `generate` on left-padded batches. Options: `batch_size`, default 32."""

    def __init__(self, model: str, dtype: str, threads: int, options: dict[str, Any]):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._batch_size = options.get("batch_size", 32)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        ).eval()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        torch, found = self._torch, []
        for first in range(0, len(prompts), self._batch_size):
            batch = prompts[first : first + self._batch_size]
            width = max(map(len, batch))
            padding = [width - len(prompt) for prompt in batch]
            ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, batch)])  # noqa: B905
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
            with torch.inference_mode():
                answer = self._model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=max_tokens,
                    min_new_tokens=max_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                )
            found += answer[:, width:].tolist()
        return found

    def close(self) -> None:
        pass


class VllmEngine:
    """vLLM on the CPU. Options: arguments of `vllm.LLM`. tests/perf/README.md shows how to install it."""

    def __init__(self, model: str, dtype: str, threads: int, options: dict[str, Any]):
        vllm = importlib.import_module("vllm")  # not a dependency of Quire
        chosen = {"max_model_len": 2048, "max_num_seqs": 64, **options}
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=model,
            dtype=dtype,
            enable_prefix_caching=True,
            seed=0,
            disable_log_stats=True,
            **chosen,
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = self._params(
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in found]

    def close(self) -> None:
        pass


class OpenVinoEngine:
    """OpenVINO GenAI's continuous batching of a model that optimum-intel exported.

    Options: `cache_gib` and the properties of the CPU device.
    """

    def __init__(self, model: str, dtype: str, threads: int, options: dict[str, Any]):
        openvino = importlib.import_module("openvino")  # not a dependency of Quire
        openvino_genai = importlib.import_module("openvino_genai")
        options = dict(options)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = options.pop("cache_gib", 2)
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        precision = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}[dtype]
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            **options,
        }
        self._openvino, self._genai = openvino, openvino_genai
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", properties
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [self._openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        found = self._pipeline.generate(tensors, [config] * len(prompts))
        return [list(answer.m_generation_ids[0]) for answer in found]

    def close(self) -> None:
        pass


class HttpEngine:
    """A server with OpenAI's `/v1/completions` that takes token ids. Options: `url`, and `extra` fields of the body.

    The protocol returns no ids. So an answer is a list of zeros, with the length that the response's `usage` states.
    """

    def __init__(self, model: str, dtype: str, threads: int, options: dict[str, Any]):
        self._url = urllib.parse.urlsplit(options["url"])
        self._model, self._extra = model, options.get("extra", {})

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(pool.map(lambda prompt: self._complete(prompt, max_tokens), prompts))
        return [[0] * count for count in counts]

    def _complete(self, prompt: list[int], max_tokens: int) -> int:
        kind = (
            http.client.HTTPSConnection
            if self._url.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(self._url.hostname, self._url.port, timeout=3600)
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **self._extra,
        }
        path = self._url.path.rstrip("/") + "/v1/completions"
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: status {response.status}: {text[:300]!r}")
        return json.loads(text)["usage"]["completion_tokens"]

    def close(self) -> None:
        pass


# Adapter and the module that it needs, by name.
ENGINES: dict[str, tuple[type, str]] = {
    "quire": (QuireEngine, "quire"),
    "transformers": (TransformersBatch, "transformers"),
    "generate": (TransformersGenerate, "transformers"),
    "vllm": (VllmEngine, "vllm"),
    "openvino": (OpenVinoEngine, "openvino_genai"),
    "http": (HttpEngine, "http"),
}


def serve(name: str, spec: dict[str, Any]) -> None:
    """Load an engine and answer requests: one JSON object a line, on standard input and output.

    A request is `{"prompts": [[...]], "max_tokens": n}`; an answer is `{"seconds", "outputs"}` or `{"error"}`. The
    first line of output has the seconds of imports and loading. The process ends with its input.
    """
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an engine's own prints go to stderr
    adapter, module = ENGINES[name]
    try:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"no module {module!r} in {sys.prefix}")
        began = time.perf_counter()
        importlib.import_module(module)
        imports_s = time.perf_counter() - began
        engine = adapter(spec["model"], spec["dtype"], spec["threads"], spec.get("options", {}))
    except Exception as error:
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    total_s = time.perf_counter() - began
    replies.write(json.dumps({"imports_s": imports_s, "load_s": total_s - imports_s}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        replies.write(json.dumps(_answer(engine, request)) + "\n")
    engine.close()
    replies.flush()
    os._exit(0)  # some engines leave threads that do not end


def _answer(engine: BatchEngine, request: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        outputs = engine.generate(request["prompts"], request["max_tokens"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "outputs": [list(map(int, output)) for output in outputs]}


def _die_with_parent() -> None:
    """On Linux, have the kernel kill this process when the benchmark dies, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
