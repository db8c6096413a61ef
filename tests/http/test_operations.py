"""Keys, ids, probes, overload, metrics and the engine's ends, as an operator sees them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.errors import ConfigError, EngineDead
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.http import connection
from slipstream.http.app import create_app
from slipstream.http.server import ACCEPTS_A_TURN, HttpServer, serve
from slipstream.http.settings import FrontSettings

LONG: dict[str, Any] = {"prompt": "the stones", "max_tokens": 100, "ignore_eos": True}


async def test_health_answers_from_the_start_and_ready_only_after_it(serving: Any) -> None:
    async with serving(started=False) as served:
        assert (await served.ask("GET", "/health")).status == 200
        assert (await served.ask("GET", "/ready")).status == 503
        early = await served.post("/v1/completions", LONG)
        assert (early.status, early.json["error"]["code"]) == (503, "starting")
        assert int(early.headers["retry-after"]) >= 1
        assert (await served.ask("GET", "/metrics")).status == 200
        await served.engine.start()
        assert (await served.ask("GET", "/ready")).json == {"status": "ready"}
        assert (await served.post("/v1/completions", LONG)).status == 200


async def test_a_dead_engine_is_unhealthy_and_every_client_hears_of_it(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(Script(step_time_s=0.002)) as served:
        clients = [await served.connect() for _ in range(4)]
        for index, client in enumerate(clients):
            await client.send("POST", "/v1/completions", {**LONG, "max_tokens": 450, "stream": index < 2})
        await clients[0].read_until(lambda answer: answer.body.count(b"data:") > 3)

        def dead(*_: object) -> None:
            raise EngineDead("the device is gone")

        monkeypatch.setattr(ScriptedWorker, "launch", dead)
        answers = [await client.answer() for client in clients]
        for answer in answers[:2]:
            assert answer.events[-1]["error"]["code"] == "engine_dead"
        for answer in answers[2:]:
            assert (answer.status, answer.json["error"]["code"]) == (503, "engine_dead")
        assert (await served.ask("GET", "/health")).status == 503
        assert (await served.ask("GET", "/ready")).status == 503
        assert (await served.post("/v1/completions", LONG)).json["error"]["code"] == "engine_dead"


async def test_a_step_that_never_ends_turns_health_red(serving: Any) -> None:
    front = FrontSettings(stuck_after_s=0.1)
    async with serving(Script(step_time_s=0.5), front=front) as served:
        assert (await served.ask("GET", "/health")).status == 200
        client = await served.connect()
        await client.send("POST", "/v1/completions", {**LONG, "max_tokens": 1})
        statuses = []
        async with asyncio.timeout(5):
            while 503 not in statuses:
                answer = await served.ask("GET", "/health")
                statuses.append(answer.status)
        assert answer.json == {"status": "stuck"}
        assert (await client.answer()).status == 200
        assert (await served.ask("GET", "/health")).status == 200


async def test_a_full_queue_is_a_429_at_once_and_takes_nothing_half(serving: Any) -> None:
    settings = {"max_queued_requests": 3}
    async with serving(Script(step_time_s=0.02), num_rows=1, engine_settings=settings) as served:
        for _ in range(2):
            client = await served.connect()
            await client.send("POST", "/v1/completions", {**LONG, "stream": True})
        async with asyncio.timeout(5):
            while served.engine.stats.num_waiting != 1 or not served.engine.stats.num_running:
                await asyncio.sleep(0)
        body = {**LONG, "prompt": ["a"] * 3}
        for stream in (True, False):
            answer = await served.post("/v1/completions", {**body, "stream": stream})
            assert (answer.status, answer.json["error"]["code"]) == (429, "overloaded")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["content-type"] == "application/json"
            assert served.engine.stats.num_waiting == 1
        for client in served.clients:
            client.close()


async def test_the_api_key_guards_everything_but_probes(serving: Any) -> None:
    async with serving(api_key=["one", "two"]) as served:
        for path in ("/v1/models", "/server_info", "/nope"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic one"}):
                answer = await served.ask("GET", path, **headers)
                assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["x-request-id"]
        assert (await served.post("/v1/completions", LONG)).status == 401
        for key in ("one", "two"):
            assert (await served.ask("GET", "/v1/models", authorization=f"Bearer {key}")).status == 200
        for path in ("/health", "/ready", "/metrics"):
            assert (await served.ask("GET", path)).status == 200


async def test_aborting_others_requests_takes_the_admin_key(serving: Any) -> None:
    async with serving(Script(step_time_s=0.002), api_key="user", admin_key="root") as served:
        stream = await served.connect()
        body = {**LONG, "max_tokens": 450, "stream": True}
        await stream.send("POST", "/v1/completions", body, x_request_id="mine", authorization="Bearer user")
        await stream.read_until(lambda answer: b"data:" in answer.body)
        refused = await served.post("/abort_request", {"rid": "mine"}, authorization="Bearer user")
        assert refused.status == 401
        done = await served.post("/abort_request", {"rid": "cmpl-mine"}, authorization="Bearer root")
        assert done.json == {"num_aborted": 1}
        assert (await stream.answer()).events[-1]["error"]["code"] == "aborted"
        again = await served.post("/abort_request", {"rid": "mine"}, authorization="Bearer root")
        assert again.json == {"num_aborted": 0}


async def test_without_an_admin_key_there_are_no_admin_endpoints(serving: Any) -> None:
    async with serving() as served:
        assert (await served.post("/abort_request", {"abort_all": True})).status in (401, 404)


async def test_browsers_of_allowed_origins_may_ask(serving: Any) -> None:
    async with serving(cors_origins=["http://page.test"], api_key="k") as served:
        preflight = await served.ask(
            "OPTIONS", "/v1/completions", origin="http://page.test", access_control_request_method="POST"
        )
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.test"
        refused = await served.ask("GET", "/v1/models", origin="http://page.test")
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == "http://page.test"
        stream = await served.post(
            "/v1/completions", {**LONG, "stream": True}, origin="http://page.test", authorization="Bearer k"
        )
        assert stream.headers["access-control-allow-origin"] == "http://page.test"
        assert stream.events[-1] == "[DONE]"


async def test_request_ids_come_back_and_bad_ones_are_replaced(serving: Any) -> None:
    async with serving() as served:
        answer = await served.post("/v1/completions", LONG, x_request_id="abc-1")
        assert (answer.headers["x-request-id"], answer.json["id"]) == ("abc-1", "cmpl-abc-1")
        body = await served.post("/v1/completions", {**LONG, "request_id": "mine"}, x_request_id="abc-1")
        assert (body.headers["x-request-id"], body.json["id"]) == ("mine", "cmpl-mine")
        for bad in ("x" * 200, "two words"):
            replaced = (await served.ask("GET", "/health", x_request_id=bad)).headers["x-request-id"]
            assert replaced != bad
            assert replaced.isalnum()


async def test_metrics_count_what_happened(serving: Any) -> None:
    async with serving() as served:
        await served.post("/v1/completions", {**LONG, "max_tokens": 5, "stream": True})
        await served.post("/v1/completions", {**LONG, "max_tokens": 5})
        await served.post("/v1/completions", {**LONG, "temperature": -1})
        lines = set((await served.ask("GET", "/metrics")).body.decode().splitlines())
    label = '{model_name="tiny"}'
    for expected in (
        f"slipstream:num_requests_running{label} 0.0",
        f"slipstream:generation_tokens_total{label} 10.0",
        f"slipstream:time_to_first_token_seconds_count{label} 2.0",
        'slipstream:request_success_total{finished_reason="length",model_name="tiny"} 2.0',
        'slipstream:http_errors_total{model_name="tiny",status="400"} 1.0',
    ):
        assert expected in lines, expected


async def test_server_info_tokenize_and_detokenize(serving: Any, tokenizer: Any) -> None:
    async with serving() as served:
        info = (await served.ask("GET", "/server_info")).json
        assert (info["models"], info["max_model_len"], info["state"]) == (["tiny"], 512, "ready")
        ids = (await served.post("/tokenize", {"prompt": "past the stones"})).json
        assert ids["tokens"] == tokenizer.encode("past the stones")
        assert ids["count"] == len(ids["tokens"])
        text = (await served.post("/detokenize", {"tokens": ids["tokens"]})).json
        assert text == {"prompt": "past the stones"}
        for body in ({"tokens": [300]}, {"tokens": [-1]}, {"tokens": "x"}, {}):
            assert (await served.post("/detokenize", body)).json["error"]["param"].startswith("tokens")
        for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": [1]}):
            assert (await served.post("/tokenize", body)).status == 400


async def test_a_head_that_never_ends_is_cut_off(serving: Any, tokenizer: Any) -> None:
    async with serving() as served:
        app = served.server._config.app
        async with HttpServer(app, port=0, head_timeout_s=0.05) as server:
            for start in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nx: y\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(start)
                assert (await asyncio.wait_for(reader.read(), 2)).startswith(b"HTTP/1.1 408")
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 70_000)
            assert (await asyncio.wait_for(reader.read(), 2)).startswith(b"HTTP/1.1 431")
            writer.close()


async def test_a_burst_of_connections_is_accepted_in_a_few_turns_of_the_loop(serving: Any) -> None:
    async with serving() as served:
        connections = served.server._server.server_state.connections
        clients = [socket.create_connection(("127.0.0.1", served.server.port)) for _ in range(4 * ACCEPTS_A_TURN)]
        assert not connections, "the loop has had no turn"
        for _ in range(8):
            await asyncio.sleep(0)
        assert len(connections) == len(clients)
        for client in clients:
            client.close()


async def test_it_listens_on_a_unix_socket_and_tidies_up(serving: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "s")
    async with serving() as served:
        app = served.server._config.app
        for _ in range(2):
            async with HttpServer(app, uds=path) as server:
                assert server.url == f"unix:{path}"
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
                assert b"200 OK" in await reader.read()
                writer.close()
                with pytest.raises(ConfigError):
                    async with HttpServer(app, uds=path):
                        pass
            assert not (tmp_path / "s").exists()


async def test_a_port_that_is_taken_and_half_a_certificate_are_config_errors(serving: Any) -> None:
    async with serving() as served:
        app = served.server._config.app
        with pytest.raises(ConfigError, match=str(served.server.port)) as refused:
            async with HttpServer(app, port=served.server.port):
                pass
        assert refused.value.field == "port"
        for field, half in (("ssl_keyfile", {"ssl_certfile": "a.pem"}), ("ssl_certfile", {"ssl_keyfile": "a.pem"})):
            with pytest.raises(ConfigError, match="certificate") as refused:
                HttpServer(app, **half)
            assert refused.value.field == field


async def test_an_address_that_is_not_this_machine_s_is_a_fault_of_the_host_and_not_of_the_port(serving: Any) -> None:
    async with serving() as served:
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0") as refused:  # from a block that nobody has
            async with HttpServer(served.server._config.app, host="192.0.2.1", port=0):
                pass
    assert refused.value.field == "host"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *alternative, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def test_streams_and_hang_ups_work_over_tls(certificate: tuple[str, str], serving: Any) -> None:
    cert, key = certificate
    async with serving(Script(step_time_s=0.002)) as served:
        app = served.server._config.app
        async with HttpServer(app, port=0, ssl_certfile=cert, ssl_keyfile=key) as server:
            assert server.url == f"https://127.0.0.1:{server.port}"
            trust = ssl.create_default_context(cafile=cert)
            for num_tokens, is_read in ((5, True), (450, False)):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trust)
                body = json.dumps({**LONG, "max_tokens": num_tokens, "stream": True}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await reader.readuntil(b"data:")
                if is_read:
                    assert b"data: [DONE]" in await reader.read()
                writer.close()
            async with asyncio.timeout(3):
                while not served.engine.num_aborted:
                    await asyncio.sleep(0)
        with pytest.raises(ConfigError):
            async with HttpServer(app, port=0, ssl_certfile=key, ssl_keyfile=cert):
                pass


async def test_a_root_path_is_cut_off_before_the_routes(serving: Any, connect: Any) -> None:
    async with serving(api_key="k") as served:
        app = create_app(served.engine, served_model_name="tiny", api_key="k")
        async with HttpServer(app, port=0, root_path="/llm") as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
            assert b"200 OK" in await reader.read()
            writer.close()
            client = await connect(server.port)
            await client.send("GET", "/openapi.json", authorization="Bearer k")
            assert (await client.answer()).json["servers"] == [{"url": "/llm"}], "as clients of the proxy see it"
        assert "servers" not in (await served.ask("GET", "/openapi.json", authorization="Bearer k")).json


def test_settings_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        FrontSettings(ping_interval_s=0)
    assert caught.value.field == "ping_interval_s"


async def test_the_openapi_document_has_every_status_that_is_refused_with(serving: Any) -> None:
    """But those of a head that is no request."""
    sources = [path for path in Path(connection.__file__).parent.glob("*.py") if path.name != "connection.py"]
    used = {status for path in sources for status in re.findall(r"(?:Refused\(|status=)(\d{3})", path.read_text())}
    async with serving() as served:
        document = (await served.ask("GET", "/openapi.json")).json
    assert {"400", "409", "503"} < used
    for path in document["paths"].values():
        for operation in path.values():
            assert used <= set(operation["responses"])


async def test_the_openapi_document_describes_every_body_and_resolves(serving: Any) -> None:
    async with serving() as served:
        document = (await served.ask("GET", "/openapi.json")).json
        assert {"/v1/chat/completions", "/v1/completions", "/generate", "/health"} <= set(document["paths"])
        references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
        assert references <= set(document["components"]["schemas"])
        chat = document["components"]["schemas"]["ChatBody"]
        assert {"messages", "temperature", "top_k", "stream"} <= set(chat["properties"])
        assert chat["additionalProperties"] is False
        for path, methods in document["paths"].items():
            for method in methods:
                answer = await served.ask(method.upper(), path.replace("{model}", "tiny"), b"{}")
                assert answer.status in (200, 400, 401), (path, answer.status)


@pytest.mark.skipif(sys.platform != "linux", reason="what connections inherit is asked of Linux")
async def test_the_write_timeout_that_serve_was_given_reaches_the_sockets(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[asyncio.Transport] = []
    made = connection.ServedConnection.connection_made

    def connection_made(self: connection.ServedConnection, transport: asyncio.Transport) -> None:
        accepted.append(transport)
        made(self, transport)

    monkeypatch.setattr(connection.ServedConnection, "connection_made", connection_made)
    url = asyncio.get_running_loop().create_future()
    async with serving() as served:
        app, engine = served.server._config.app, served.engine
        task = asyncio.create_task(serve(app, engine, port=0, write_timeout_s=7.0, on_ready=url.set_result))
        port = int((await url).rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        while not accepted:
            await asyncio.sleep(0.01)
        sock = accepted[0].get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == connection.KEEPALIVE_IDLE_S
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
