"""Converts the router's answers, errors and reports to gRPC messages."""

from __future__ import annotations

import math
from typing import Any

import grpc

from quire.cluster.api_common.front_end import (
    TIMEOUT_HEADER,
    Answer,
    Progress,
    explain_headers,
    internal_error,
    renamed,
    retry_after_ms,
)
from quire.cluster.grpc.grpc_requests import Context
from quire.cluster.grpc.grpc_tools import TOOL_NAMES, calls_of
from quire.protos import control_pb2 as control
from quire.protos import generation_pb2 as generation
from quire.protos.errors import QuireError
from quire.protos.wire import Load
from quire.router.request.resume import EventIds
from quire.router.scored_token import ScoredToken, TokenScores
from quire.router.status_types import (
    AdapterEntry,
    LiveState,
    PrefixHits,
    ReplicaStatus,
    RoutingRegret,
)
from quire.router.types import GenerationRequest, GenerationStream, OutputDelta, Usage

_FINISH_REASONS = {
    "stop": generation.FINISH_REASON_STOP,
    "length": generation.FINISH_REASON_LENGTH,
    "tool_calls": generation.FINISH_REASON_TOOL_CALLS,
}

# The API's names for fields that have other names in the router.
_NAMES = {
    "tenant": "cache_salt",
    "deadline_s": TIMEOUT_HEADER,
    "timeout": TIMEOUT_HEADER,
    **TOOL_NAMES,
}


class Responses:
    """Makes the messages of one stream from its deltas (a delta has the new tokens of one choice and their text)."""

    def __init__(self, stream: GenerationStream, asked: GenerationRequest):
        marks = asked.marks
        self._stream = stream
        self._is_resumed = asked.resume_from is not None
        self._ids = EventIds(stream.origin, marks)
        # By choice: tokens that the client of a resumed stream already has.
        self._num_received = [mark.num_tokens for mark in marks]
        self._sent = [Progress() for _ in marks]
        self._unfinished = [
            progress for progress, mark in zip(self._sent, marks, strict=True) if not mark.finished
        ]
        self._num_open = len(self._unfinished)
        self._is_first = True
        self.are_complete = not self._unfinished  # whether the last message has been made

    def of(self, delta: OutputDelta) -> generation.GenerateResponse:
        """Make the message for a delta.

        This runs for every token of every stream. Setting fields takes half the time of passing them to the
        constructor, and rarely used fields are not touched.
        """
        choice = delta.choice
        progress = self._sent[choice]
        index = self._num_received[choice] + progress.num_tokens
        progress.add(delta)
        response = generation.GenerateResponse()
        response.text = delta.text
        response.token_ids.extend(delta.token_ids)
        response.index = index
        if choice:
            response.choice = choice
        response.event_id = self._ids.after(delta)
        if delta.logprobs is not None:
            response.logprobs.extend(token_scores(delta.logprobs))
        if delta.reasoning:
            response.reasoning = delta.reasoning
        if delta.tool_calls:
            response.tool_calls.extend(calls_of(delta.tool_calls))
        if self._is_first:
            self._is_first = False
            self._introduce(response)
        if delta.finish_reason is not None:
            set_finish(response, progress)
            self._num_open -= 1
            self.are_complete = not self._num_open
        if self.are_complete:
            set_usage(response, self._stream.usage)
        return response

    def _introduce(self, response: generation.GenerateResponse) -> None:
        """Add the fields that only the first message has."""
        stream = self._stream
        response.seed = stream.origin.seed
        response.request_id = stream.request_id
        response.model = stream.model
        if not self._is_resumed:
            response.prompt_logprobs.extend(prompt_scores(stream))

    def end(self) -> None:
        """Check at the end of the stream that every choice has a finish reason."""
        for progress in self._unfinished:
            progress.end()


def set_finish(
    response: generation.GenerateResponse | generation.GenerateOnceResponse | generation.Choice,
    ended: Progress,
) -> None:
    assert ended.finish_reason is not None
    response.finish_reason = _FINISH_REASONS[ended.finish_reason]
    if isinstance(ended.stop_reason, str):
        response.stop_string = ended.stop_reason
    elif ended.stop_reason is not None:
        response.stop_token_id = ended.stop_reason


def answer_fields(answer: Answer) -> dict[str, Any]:
    """Return the fields that `GenerateOnceResponse` and `Choice` share, without the finish."""
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "logprobs": token_scores(answer.logprobs),
        "reasoning": answer.reasoning,
        "tool_calls": calls_of(answer.tool_calls),
    }


def token_scores(scores: list[TokenScores] | None) -> list[generation.TokenScores]:
    def scored(token: ScoredToken) -> generation.ScoredToken:
        return generation.ScoredToken(
            token_id=token.token_id, logprob=token.logprob, utf8=token.utf8
        )

    return [
        generation.TokenScores(
            token=scored(of_token.token), top=map(scored, of_token.top), rank=of_token.rank
        )
        for of_token in scores or ()
    ]


def prompt_scores(stream: GenerationStream) -> list[generation.TokenScores]:
    """The scores of the prompt without its first token, which has no log-probability."""
    return token_scores((stream.prompt_scores or [])[1:])


def set_usage(
    response: generation.GenerateResponse
    | generation.GenerateOnceResponse
    | generation.EmbedResponse,
    usage: Usage,
) -> None:
    response.usage.prompt_tokens = usage.prompt_tokens
    response.usage.completion_tokens = usage.completion_tokens
    response.usage.cached_tokens = usage.cached_tokens
    response.usage.host_cached_tokens = usage.host_cached_tokens
    response.usage.peer_cached_tokens = usage.peer_cached_tokens
    response.usage.reasoning_tokens = usage.reasoning_tokens
    response.usage.accepted_prediction_tokens = usage.accepted_prediction_tokens
    response.usage.rejected_prediction_tokens = usage.rejected_prediction_tokens


def set_explain(context: Context, explain: Any) -> None:
    context.set_trailing_metadata(list(explain_headers(explain, complete=True).items()))


def set_status(context: Context, error: Exception) -> QuireError:
    """Set the call's status and trailing metadata from an error; return the error with the API's field name."""
    error = renamed(error, _NAMES) if isinstance(error, QuireError) else internal_error(error)
    context.set_code(grpc.StatusCode[error.grpc_status])
    context.set_details(error.message)
    metadata = [("x-quire-error-code", error.code)]
    if error.field is not None:
        metadata.append(("x-quire-error-field", error.field))
    if error.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(retry_after_ms(error.retry_after_s))))
    context.set_trailing_metadata(metadata)
    return error


def adapter_message(entry: AdapterEntry) -> control.Adapter:
    ref = entry.ref
    return control.Adapter(
        name=ref.name, path=ref.path, digest=ref.digest, created_s=entry.created_s
    )


def replica_load(status: ReplicaStatus) -> control.ReplicaLoad:
    load = status.load
    return control.ReplicaLoad(
        replica=status.replica,
        epoch=status.epoch,
        attached=status.attached,
        report_age_ms=status.report_age_s * 1000,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_prefill_tokens=load.queued_prefill_tokens,
        num_decode_tokens=load.num_decode_tokens,
        prefill_ms_per_token=load.prefill_s_per_token * 1000,
        decode_step_ms=load.decode_step_s * 1000,
        num_steps=load.num_steps,
        num_compiles=load.num_compiles,
        num_preemptions=load.num_preemptions,
        cache=_occupancy(load),
    )


def replica_cache(status: ReplicaStatus) -> control.ReplicaCache:
    return control.ReplicaCache(
        replica=status.replica,
        epoch=status.epoch,
        attached=status.attached,
        report_age_ms=status.report_age_s * 1000,
        cache=_occupancy(status.load),
        indexed_blocks=status.indexed_blocks,
    )


def router_state(state: LiveState) -> control.WatchRouterResponse:
    queue = state.queue
    message = control.WatchRouterResponse(
        router=state.router,
        routers=state.routers,
        num_routers=state.num_routers,
        model=state.model,
        now_s=state.now,
        queue=control.RouterQueue(
            num_requests=queue.num_requests,
            num_prompt_tokens=queue.num_prompt_tokens,
            expected_wait_ms=queue.expected_wait_s * 1000,
        ),
        num_decisions=state.num_decisions,
        num_deltas=state.num_deltas,
        replicas=[_replica_state(status, state.hits) for status in state.replicas],
        requests=[_routed_request(decision) for decision in state.decisions],
        moves=[_routed_request(decision) for decision in state.moves],
        regrets=[_routing_regret(regret) for regret in state.regrets],
    )
    median_s, p95_s = state.ttft_quantile_s(0.5), state.ttft_quantile_s(0.95)
    if median_s is not None and p95_s is not None:
        message.ttft_median_ms, message.ttft_p95_ms = median_s * 1000, p95_s * 1000
    return message


def _routing_regret(regret: RoutingRegret) -> control.RoutingRegret:
    has_interval = math.isfinite(regret.half_s)
    return control.RoutingRegret(
        policy=regret.policy,
        num_requests=regret.num_requests,
        mean_ms=regret.mean_s * 1000,
        low_ms=regret.low_s * 1000 if has_interval else None,
        high_ms=regret.high_s * 1000 if has_interval else None,
        modelled_ms=regret.modelled_s * 1000,
        measured_ms=regret.measured_s * 1000,
    )


def _replica_state(status: ReplicaStatus, hits: dict[str, PrefixHits]) -> control.ReplicaState:
    found = hits.get(status.replica, PrefixHits())
    return control.ReplicaState(
        load=replica_load(status),
        state=status.state,
        prompt_tokens=found.prompt_tokens,
        cached_tokens=found.cached_tokens,
        predicted_tokens=found.predicted_tokens,
    )


def _routed_request(decision: dict[str, Any]) -> control.RoutedRequest:
    """Convert a decision, in the form of `explain.decisions.DecisionRing`."""
    best, *others = (_replica_cost(score) for score in decision["ranking"])
    outcome = decision["outcome"]
    return control.RoutedRequest(
        request_id=decision["request_id"],
        attempt=decision["attempt"],
        decided_s=decision["decided"],
        prompt_tokens=decision["prompt_tokens"],
        left_replica=decision["left_replica"],
        best=best,
        runner_up=others[0] if others else None,
        ttft_ms=None if outcome is None else outcome["ttft_s"] * 1000,
        cached_tokens=None if outcome is None else outcome["cached_tokens"],
    )


def _replica_cost(score: dict[str, Any]) -> control.ReplicaCost:
    return control.ReplicaCost(
        replica=score["replica"],
        cost_ms=score["cost_s"] * 1000,
        terms_ms={name: seconds * 1000 for name, seconds in score["terms"].items() if seconds},
        cached_tokens=score["cached_tokens"] + score["host_cached_tokens"],
    )


def _occupancy(load: Load) -> control.CacheOccupancy:
    """Occupancy of a replica's tiers: the device, and the host tier if there is one."""
    device = control.TierOccupancy(
        tier=control.TIER_DEVICE,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_in_use=load.blocks_in_use,
        blocks_total=load.blocks_total,
        blocks_retained=load.blocks_retained,
    )
    if not load.host_blocks_total:
        return control.CacheOccupancy(tiers=[device])
    host = control.TierOccupancy(
        tier=control.TIER_HOST,
        blocks_free=load.host_blocks_free,
        blocks_cached=load.host_blocks_cached,
        blocks_in_use=load.host_blocks_in_use,
        blocks_total=load.host_blocks_total,
        blocks_retained=load.host_blocks_retained,
    )
    return control.CacheOccupancy(tiers=[device, host])
