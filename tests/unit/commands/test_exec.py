"""``kvtier doctor POD`` runs its checks inside the pod over the API server's exec."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from tests.support import pods

from kvtier.cli.cluster.access import ClusterOptions, open_reader
from kvtier.cli.cluster.doctor_pod import INSIDE, ExecError, exec_in
from kvtier_operator.api.pods import decode_pod


class ExecServer:
    """The exec endpoint of an API server. ``status``: 101 for a connection, else a refusal."""

    def __init__(self, status: int = 101) -> None:
        self.status = status
        self.asked: list[tuple[str, list[str], str]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        command = request.query.getall("command")
        self.asked.append((request.path, command, request.query["container"]))
        if self.status != 101:
            return web.json_response({"message": "no"}, status=self.status)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        text = json.dumps({"findings": [], "name": "größer"})
        for piece in (text[:10], text[10:]):
            await socket.send_bytes(b"\x01" + piece.encode())
        await socket.send_bytes(b"\x03" + json.dumps({"status": "Success"}).encode())
        await socket.close()
        return socket


def run(server: ExecServer, home: Path) -> str:
    async def scenario() -> str:
        application = web.Application()
        application.router.add_get("/api/v1/namespaces/serving/pods/chat-1/exec", server.answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            config = _kubeconfig(runner.addresses[0][1])
            path = home / "config"
            path.write_text(yaml.safe_dump(config))
            pod = decode_pod(pods.running(pods.injected_pod()))
            async with open_reader(ClusterOptions(path)) as reader:
                assert reader.namespace == "serving", "the context's"
                return await exec_in(reader)(pod, INSIDE)
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


def _kubeconfig(port: int) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "ann", "user": {"token": "t"}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "ann", "namespace": "serving"}}
        ],
    }


def test_the_output_of_the_command_in_the_tierd_container(tmp_path: Path) -> None:
    server = ExecServer()
    assert json.loads(run(server, tmp_path))["name"] == "größer"
    ((path, command, container),) = server.asked
    assert path.endswith("/pods/chat-1/exec")
    assert (command, container) == (list(INSIDE), "kvtier-tierd")


@pytest.mark.parametrize(
    ("status", "text"),
    [(403, "the right to get and create pods/exec in namespace serving is missing"), (500, "500")],
)
def test_refusals(tmp_path: Path, status: int, text: str) -> None:
    with pytest.raises(ExecError, match=text):
        run(ExecServer(status), tmp_path)
