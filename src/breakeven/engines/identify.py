"""Which engine answers at a URL, what it serves, and what it tells of its own configuration.

The order of questions: GET /v1/models, whose answer also shows whether anything is there and admits us; then
the endpoints that only one engine has; last, for servers that show nothing but their generating routes, a
POST of `{}`, which every engine refuses as incomplete before it touches the model.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from breakeven.engines.http import Client, Response, checked_url, shown
from breakeven.errors import TargetError

__all__ = ["Api", "Engine", "Identity", "choose_model", "identify", "is_alive"]

Engine = Literal["vllm", "sglang", "llama.cpp", "tgi", "other"]
Api = Literal["chat", "completions", "sglang"]
Json = dict[str, object]

_OPENAI: tuple[Api, ...] = ("chat", "completions")
_LISTED_AT_MOST = 5

# What users paste behind the root.
_ENDING = re.compile(r"/*(/v1(/chat/completions|/completions|/models)?|/generate|/completion|/metrics)?/*$")

# What is kept of a server's own configuration. A list of names, since SGLang's dump holds its api_key and
# vLLM's its hf_token; whatever is named or shaped like a secret is left out even so.
# fmt: off
_KEPT = frozenset((
    "async_scheduling", "attention_backend", "block_size", "build_info", "cache_dtype",
    "chunked_prefill_size", "context_length", "cuda_graph_max_bs", "data_parallel_size",
    "decode_log_interval", "disable_cuda_graph", "disable_overlap_schedule", "disable_radix_cache", "dp_size",
    "dtype", "effective_max_running_requests_per_dp", "enable_chunked_prefill", "enable_dp_attention",
    "enable_expert_parallel", "enable_metrics", "enable_prefix_caching", "enforce_eager", "ep_size",
    "gpu_memory_utilization", "kv_cache_dtype", "max_batch_total_tokens", "max_concurrent_requests",
    "max_input_tokens", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_running_requests",
    "max_total_num_tokens", "max_total_tokens", "mem_fraction_static", "model", "model_dtype", "model_ftype",
    "model_id", "model_path", "model_sha", "n_ctx", "num_gpu_blocks", "page_size", "pipeline_parallel_size",
    "pp_size", "quantization", "schedule_policy", "scheduler_cls", "tensor_parallel_size", "total_slots",
    "tp_size",
))
# fmt: on
_SECRET_NAME = re.compile(r"key|secret|passw|credential|auth|cookie|token$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s]*@")


@dataclass(frozen=True)
class Identity:
    """A server as far as it tells about itself. Holds no secret: it may be written to a manifest.

    `base_url` is the root without trailing slash or /v1; `models` is in the server's order and may be empty;
    `apis` are those that can be expected to work; `metrics_url` is None where no counters are shown.
    """

    base_url: str
    engine: Engine
    version: str | None
    models: tuple[str, ...]
    config: dict[str, object]
    apis: tuple[Api, ...]
    metrics_url: str | None


@dataclass(frozen=True)
class _Listing:
    """What GET /v1/models told: the models' cards, none where there is no such endpoint."""

    cards: tuple[Json, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(str(card["id"]) for card in self.cards if card.get("id"))

    @property
    def owner(self) -> object:
        return self.cards[0].get("owned_by") if self.cards else None


@dataclass(frozen=True)
class _Found:
    engine: Engine
    version: object = None
    models: tuple[str, ...] = ()
    config: Json = field(default_factory=dict)
    apis: tuple[Api, ...] = _OPENAI


def identify(server_url: str, headers: Mapping[str, str], timeout_s: float = 10.0) -> Identity:
    """Ask the server at `server_url` what it is; `headers` go with every question, `timeout_s` bounds each.

    `server_url` may end in a slash, /v1 or an endpoint, and may carry a path before that. Raises
    `TargetError` (one line with the mend, never with a secret) if the URL can't be used, nothing answers
    there, it isn't an LLM server, it is still loading, or it wants a key that `headers` don't hold.
    """
    base_url = _root(server_url)
    with Client(base_url, headers, timeout_s) as client:
        found = _recognise(client, _listing(client, headers))
        if found.engine in ("llama.cpp", "tgi"):
            # Both may show their models to anybody and want the key only where they generate; they look at it
            # before the method (llama.cpp: on any other path; TGI 3: in a layer around `base_routes`).
            _refuse_closed(client.get("/v1/chat/completions"), client, headers)
        metrics_url = None if _metrics_page(client) is None else f"{base_url}/metrics"
    version = str(found.version) if found.version else None
    return Identity(base_url, found.engine, version, found.models, found.config, found.apis, metrics_url)


def choose_model(identity: Identity, wanted: str | None) -> str:
    """The model to name in requests: the wanted one, else the first that is listed.

    A server that lists none gets the wanted name unchecked; where none is wanted either, "default" goes to
    engines that serve one model whatever it is called. Raises `TargetError` if the wanted model isn't listed,
    or if there is none to choose and the engine needs one.
    """
    models = identity.models
    if wanted is not None and models and wanted not in models:
        listed = ", ".join(map(repr, models[:_LISTED_AT_MOST]))
        more = f" and {len(models) - _LISTED_AT_MOST} more" if len(models) > _LISTED_AT_MOST else ""
        raise TargetError(f"{identity.base_url} has no {wanted!r} but {listed}{more}: correct --model")
    named = (wanted,) if wanted is not None else models
    if not named and identity.engine not in ("llama.cpp", "sglang", "tgi"):
        raise TargetError(f"{identity.base_url} doesn't list its models: name one with --model")
    return named[0] if named else "default"


def is_alive(base_url: str, headers: Mapping[str, str], patience_s: Sequence[float] = (0.0, 2.0, 6.0)) -> bool:
    """Whether a server that was identified before still answers; asked once after each of the pauses (seconds).

    A server that is down, or that a proxy says is down, is asked again: it may be on its way back.
    """
    with Client(base_url, headers, 5.0) as client:
        for pause_s in patience_s:
            time.sleep(pause_s)
            try:
                if client.get("/v1/models").status not in (502, 503, 504):
                    return True
            except TargetError:
                continue
    return False


def _root(server_url: str) -> str:
    """The server's root: what requests put /v1/… behind."""
    parts = checked_url(server_url.strip())
    return f"{parts.scheme}://{parts.netloc}{_ENDING.sub('', parts.path)}"


def _listing(client: Client, headers: Mapping[str, str]) -> _Listing:
    """The first question; raises `TargetError` where the server turns us away."""
    answer = client.get("/v1/models")
    _refuse_closed(answer, client, headers)
    if 300 <= answer.status < 400 and "location" in answer.headers:
        there = shown(answer.headers["location"])
        raise TargetError(f"{client.base_url} sends us on to {there}: give that server's URL (--server-url)")
    if answer.status in (502, 503, 504):
        # llama.cpp answers 503 to everything while it loads; a proxy answers so while its server is away.
        raise TargetError(
            f"{client.base_url} answers with {answer.status}: its server is down or still loading the model:"
            f" try again once {client.base_url}/health answers with 200 (--server-url)"
        )
    cards = _dict(answer.json()).get("data")
    return _Listing(tuple(map(_dict, cards)) if isinstance(cards, list) else ())


def _refuse_closed(answer: Response, client: Client, headers: Mapping[str, str]) -> None:
    if answer.status in (401, 403):
        given = any(_SECRET_NAME.search(name) for name in headers)
        why = "refuses the key it was given" if given else "wants a key"
        raise TargetError(
            f"{client.base_url} {why} (status {answer.status}): name the environment variable that holds it"
            " with --api-key-env, or give it with --header"
        )


def _recognise(client: Client, listing: _Listing) -> _Found:
    owner = _LOOKS.get(str(listing.owner))
    for look in (owner,) if owner else _LOOKS.values():
        if found := look(client, listing):
            return found
    return _Found("other", models=listing.models) if listing.cards else _by_routes(client)


def _vllm(client: Client, listing: _Listing) -> _Found | None:
    # vLLM 0.32, entrypoints/serve/engine/protocol.py ModelCard: {"id", "owned_by": "vllm", "max_model_len"};
    # serve/instrumentator/basic.py GET /version -> {"version": "0.32.0"}; v1/metrics/loggers.py "vllm:…".
    about = _asked(client, "/version")
    if listing.owner != "vllm" and not ("version" in about and b"\nvllm:" in (_metrics_page(client) or b"")):
        return None
    config = _kept(listing.cards[0]) if listing.cards else {}
    config |= _vllm_config(_asked(client, "/server_info?config_format=json"))
    return _Found("vllm", about.get("version"), listing.models, config)


def _vllm_config(info: Json) -> Json:
    # serve/dev/server_info/api_router.py, only with VLLM_SERVER_DEV_MODE=1: {"vllm_config": {"model_config":
    # {…}, "speculative_config": {…} or null, …}, "vllm_env", "system_env"}; their fields: vllm/config/*.py.
    whole = _dict(info.get("vllm_config"))
    config: Json = {}
    for part in ("model_config", "cache_config", "parallel_config", "scheduler_config"):
        config |= _kept(_dict(whole.get(part)))
    if "speculative_config" in whole:
        config["speculative_config"] = _harmless(_dict(whole["speculative_config"])) or None
    return config


def _sglang(client: Client, listing: _Listing) -> _Found | None:
    # SGLang 0.5.23, srt/entrypoints/http_server.py: GET /server_info (formerly /get_server_info) -> the
    # resolved server arguments (srt/arg_groups/fields/*.py) in one flat dict with "version" and
    # "internal_states", a dict for each data-parallel rank; GET /model_info (formerly /get_model_info) ->
    # {"model_path", "is_generation", …}; openai/protocol.py ModelCard: "owned_by": "sglang".
    info = _asked(client, "/server_info") or _asked(client, "/get_server_info")
    if "internal_states" not in info and listing.owner != "sglang":
        info = _asked(client, "/model_info") or _asked(client, "/get_model_info")
        if not {"model_path", "is_generation"} <= info.keys():
            return None
    models = listing.models or _name(info, "served_model_name") or _name(info, "model_path")
    return _Found("sglang", info.get("version"), models, _sglang_config(info), (*_OPENAI, "sglang"))


def _sglang_config(info: Json) -> Json:
    states = info.get("internal_states")
    config = _kept(info) | _kept(_dict(states[0]) if isinstance(states, list) and states else {})
    if info.get("speculative_algorithm"):
        config |= _harmless({name: value for name, value in info.items() if name.startswith("speculative_")})
    return config


def _llama_cpp(client: Client, listing: _Listing) -> _Found | None:
    # llama.cpp's server in xllamacpp 2026.10, asked: /v1/models has "owned_by": "llamacpp"; GET /props ->
    # {"default_generation_settings": {"n_ctx": 1024, …}, "total_slots": 2, "model_alias", "build_info", …};
    # GET /slots -> [{"id": 0, "n_ctx": 1024, "speculative": true, …}, …], 501 where it is switched off.
    # /props says "speculative.types": "none" whatever runs: only the slots tell.
    props = _asked(client, "/props")
    settings = _dict(props.get("default_generation_settings"))
    if listing.owner != "llamacpp" and not settings:
        return None
    config = _kept(settings) | _kept(props)
    answer = client.try_get("/slots")
    slots = answer.json() if answer else None
    if isinstance(slots, list):
        config["speculative"] = any(_dict(slot).get("speculative") for slot in slots)
    models = listing.models or _name(props, "model_alias") or _name(props, "model_path")
    return _Found("llama.cpp", props.get("build_info"), models, config)


def _tgi(client: Client, listing: _Listing) -> _Found | None:
    # TGI 3, router/src/lib.rs `struct Info`, router/src/server.rs: GET /info -> {"model_id", "version",
    # "router": "text-generation-router", "max_best_of", …}. /v1/models names the model as its own owner. Its
    # sibling for embeddings has /info too, without max_best_of.
    info = _asked(client, "/info")
    if not {"model_id", "max_best_of", "max_total_tokens"} <= info.keys():
        return None
    return _Found("tgi", info.get("version"), _name(info, "model_id"), _kept(info))


# By the "owned_by" of their models (TGI has none of its own); asked in this order where that tells nothing.
_LOOKS = {"llamacpp": _llama_cpp, "sglang": _sglang, "tgi": _tgi, "vllm": _vllm}


def _by_routes(client: Client) -> _Found:
    """The last resort: which generating routes refuse an empty request in JSON, as no web site does."""
    chat, completions, sglang, llama_cpp = (
        _refuses_empty(client, path) for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/completion")
    )
    if not (chat or completions or sglang or llama_cpp):
        raise TargetError(
            f"{client.base_url} speaks HTTP but is no LLM server (no /v1/models, /props, /server_info, /info,"
            " /generate or /completion): are the scheme, the port and the path right? (--server-url)"
        )
    apis: tuple[tuple[Api, bool], ...] = (("chat", chat), ("completions", completions), ("sglang", sglang))
    engine: Engine = "sglang" if sglang else "llama.cpp" if llama_cpp else "other"
    return _Found(engine, apis=tuple(api for api, there in apis if there))


def _refuses_empty(client: Client, path: str) -> bool:
    answer = client.post(path, b"{}")
    return answer.status in (400, 422, 500) and isinstance(answer.json(), dict)


def _metrics_page(client: Client) -> bytes | None:
    """The page of counters; None where there is none (a web site may answer every path with its own page)."""
    page = client.try_get("/metrics")
    return page.body if page and "html" not in page.headers.get("content-type", "") else None


def _asked(client: Client, path: str) -> Json:
    """The JSON object at `path`, empty where there is none."""
    answer = client.try_get(path)
    return _dict(answer.json()) if answer else {}


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _name(source: Json, name: str) -> tuple[str, ...]:
    return (str(source[name]),) if source.get(name) else ()


def _kept(source: Json) -> Json:
    return _harmless({name: source[name] for name in source if name in _KEPT})


def _harmless(source: Json) -> Json:
    """What may be written down: set, flat, and neither named nor shaped like a secret."""
    return {
        name: value
        for name, value in source.items()
        if not (value is None or isinstance(value, dict) or _SECRET_NAME.search(name))
        and not _SECRET_VALUE.search(str(value))
    }
