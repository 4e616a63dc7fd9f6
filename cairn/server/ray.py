"""The API on Ray Serve: Ray places replicas, each with an engine, and restarts those that fail.

Needs `pip install 'cairn-llm[ray]'`. Only Ray's public API is used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from cairn.config import EngineOptions
from cairn.errors import BadConfig, EngineDead
from cairn.models.registry import load_spec
from cairn.names import checked_keywords
from cairn.obs.log import get_logger
from cairn.obs.trace import Tracer
from cairn.server.app import create_app
from cairn.server.host_header import HostCheck
from cairn.server.in_process import Headers
from cairn.server.loading import close, load, new_state
from cairn.server.options import ServerOptions
from cairn.server.remote_prefill import RemotePrefillMiddleware, run_prefill
from cairn.server.startup_report import Say
from cairn.specs.disaggregation import DECODE, PREFILL, SECRET_VARIABLE
from cairn.specs.nodes import resolve_nodes

log = get_logger(__name__)

NAME = "cairn"
STOP_SECONDS = 2.0
HEALTH_SECONDS = 2.0
"""Interval of health checks. Ray restarts a replica that fails three in a row."""
TABLES = ("engine", "server", "resources", "autoscaling", "prefill")


@checked_keywords
@dataclass(frozen=True, slots=True)
class Plan:
    """The content of a plan file, a TOML document with these names.

    Attributes:
        model: the model folder, under the same path on every node.
        replicas: number of servers, each with an engine.
        engine: options of each engine, as keywords of `cairn.LLM`.
        server: options of each server, as fields of ServerOptions. host and port apply to Ray's
            proxy.
        resources: Ray's `ray_actor_options` of a replica, such as num_gpus and num_cpus, on each of
            its `nnodes` nodes.
        autoscaling: Ray's `autoscaling_config`, instead of `replicas`.
        prefill: a deployment that computes the prompts, while the first one only decodes:
            `replicas`, `autoscaling`, `resources`, and in `engine` the options that differ. Empty:
            each replica computes its own prompts.
    """

    model: str
    replicas: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, Any] = field(default_factory=dict)
    autoscaling: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in TABLES:
            if not isinstance(getattr(self, name), dict):
                raise BadConfig(f"{name} is {getattr(self, name)!r}", f"Write a table [{name}]")
        if not isinstance(self.model, str):
            raise BadConfig(f"model is {self.model!r}", "Give the folder of a model")
        if type(self.replicas) is not int or self.replicas < 1:
            raise BadConfig(f"replicas must be an integer >= 1, not {self.replicas!r}")
        # Report invalid options here instead of on another machine.
        self._check_nodes(*self.options())
        if self.prefill:
            self.of_prefill()

    def options(self) -> tuple[EngineOptions, ServerOptions]:
        """The options of a replica. Raises BadConfig for an invalid one."""
        server: dict[str, Any]
        server = {k: tuple(v) if isinstance(v, list) else v for k, v in self.server.items()}
        return EngineOptions(**self.engine), ServerOptions(**server)

    def _check_nodes(self, engine: EngineOptions, server: ServerOptions) -> None:
        """Raise BadConfig unless Ray can place a replica's ranks on its nodes."""
        for name in ("node_rank", "dist_init_addr", "master_addr", "master_port"):
            if value := getattr(engine, name):
                raise BadConfig(f"{name} is {value!r}, but Ray places nodes", f"Leave out {name}")
        ranks = engine.tensor_parallel_size
        resolve_nodes(replace(engine, dist_init_addr="127.0.0.1:1"), ranks, {})
        if engine.nnodes > 1:
            self._check_several(engine, server)
        here = ranks * server.data_parallel_size // engine.nnodes
        gpus = self.resources.get("num_gpus")
        if gpus and here > max(1, gpus):
            raise BadConfig(
                f"a replica has {here} ranks on a node, but [resources] gives it num_gpus = {gpus}",
                f"Write num_gpus = {here}: each rank takes a GPU of its node",
            )

    def _check_several(self, engine: EngineOptions, server: ServerOptions) -> None:
        """Raise BadConfig for options that a replica on several nodes does not support."""
        nodes = f"nnodes is {engine.nnodes}"
        if server.data_parallel_size > 1:
            raise BadConfig(
                f"{nodes} and data_parallel_size {server.data_parallel_size}, but the engines of "
                "one server are on one node",
                f"Write replicas = {server.data_parallel_size} in its place",
            )
        if self.prefill or engine.disaggregation_mode not in (None, "null"):
            raise BadConfig(
                f"{nodes}, but pages of an engine on several nodes are not sent to others",
                "Leave out nnodes, or [prefill] and disaggregation_mode",
            )
        for name in ("label_selector", "fallback_strategy"):
            if name in self.resources:
                raise BadConfig(
                    f"{nodes}, but [resources] has {name}, which placement groups do not follow",
                    "Choose nodes by resources or accelerator_type",
                )
        if not self.bundle:
            raise BadConfig(
                f"{nodes}, but [resources] takes nothing of a node",
                "Write num_cpus or num_gpus above 0: Ray places nodes by what they take",
            )

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of a replica on each of its nodes, as a bundle of a placement group."""
        own = self.resources
        taken = {
            "CPU": own.get("num_cpus", 1),
            "GPU": own.get("num_gpus"),
            "memory": own.get("memory"),
            **own.get("resources", {}),
        }
        if kind := own.get("accelerator_type"):
            # Ray's convention: a node offers 1 of its accelerator_type, an actor takes 0.001.
            taken[f"accelerator_type:{kind}"] = 0.001
        return {name: amount for name, amount in taken.items() if amount}

    def of_prefill(self) -> Plan:
        """The plan of the prefill deployment. Raises BadConfig for an invalid option."""
        for name in self.prefill:
            if name not in ("replicas", "resources", "engine", "autoscaling"):
                raise BadConfig(
                    f"[prefill] has {name!r}",
                    "It may have replicas, resources, engine, autoscaling",
                )
        engine = self.engine | self.prefill.get("engine", {}) | {"disaggregation_mode": PREFILL}
        # A free port, because a node may have several replicas. Each transfer names its port.
        engine.setdefault("disaggregation_bootstrap_port", 0)
        own = {"replicas": 1, **self.prefill, "engine": engine}
        return Plan(self.model, server=self.server, **own)

    def of_decode(self) -> Plan:
        """The plan of the decoding deployment."""
        return replace(self, engine=self.engine | {"disaggregation_mode": DECODE}, prefill={})


def plan_of(text: str) -> Plan:
    """Parse a plan file. Raises BadConfig or BadRequest for an invalid one."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"the plan is no TOML: {error}") from None
    if "model" not in found:
        raise BadConfig("the plan names no model", 'Write model = "FOLDER"')
    return Plan(**found)


class Replica:
    """A server in a Ray actor, for `ray.serve.ingress`. The engine is a separate process.

    Args:
        plan: plan of the deployment.
        prefill: handle of the prefill deployment; None if this one computes prompts.
    """

    async def __init__(self, plan: Plan, prefill: Any = None) -> None:  # type: ignore[misc]  # Ray awaits it
        engine, options = plan.options()
        if engine.disaggregation_mode == PREFILL and os.environ.get(SECRET_VARIABLE):
            from ray.util import get_node_ip_address

            # Without a secret only engines on the same node can fetch its pages.
            engine = replace(engine, disaggregation_bootstrap_host=get_node_ip_address())
        model = Path(plan.model)
        with contextlib.ExitStack() as until_loaded:
            listener = None
            if engine.nnodes > 1:
                listener, engine = self._start_nodes(plan, engine)
                until_loaded.callback(os.close, listener)
            self._state = new_state(model, engine, options, Tracer(options.trace), listener)
            await load(self._state, model, lambda name, seconds: None)
        self._state.loaded = True
        self._app: ASGIApp = create_app(
            self._state, HostCheck.of(self._state.options, self._state.options.host)
        )
        if prefill is not None:
            self._app = RemotePrefillMiddleware(self._app, prefill.prompt.remote)

    def _start_nodes(self, plan: Plan, engine: EngineOptions) -> tuple[int, EngineOptions]:
        """Start the replica's other nodes, an actor in each other bundle of its placement group.

        Returns:
            The descriptor of the socket to which they connect, and the options with its address.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        secret = os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
        engine = replace(engine, dist_init_addr=f"{host}:{listener.getsockname()[1]}")
        group = ray.util.get_current_placement_group()
        # Ray ends these actors when this one, their owner, ends.
        self._nodes = []
        for number in range(1, engine.nnodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            options = {"num_cpus": 1, **plan.resources, "scheduling_strategy": place}
            self._nodes.append(ray.remote(Node).options(**options).remote())
            self._nodes[-1].run.remote(replace(engine, node_rank=number), secret)
        return listener.detach(), engine

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def prompt(self, path: str, headers: Headers, body: bytes) -> dict[str, Any] | None:
        """Compute a request's prompt. Returns its transfer parameters, None on failure."""
        return await run_prefill(self._app, path, headers, body)

    async def check_health(self) -> None:
        """Called by Ray, which restarts the replica if this raises. Raises EngineDead."""
        if self._state.client.dead is not None:
            raise self._state.client.dead.again()

    async def __del__(self) -> None:
        await self._state.client.stop(STOP_SECONDS)
        close(self._state)


class Node:
    """A node above 0 of a replica, in an actor of Ray."""

    def run(self, engine: EngineOptions, secret: str) -> None:
        """Run the ranks of this node until node 0 ends. Raises EngineDead as `serve_node`."""
        from cairn.engine.node import serve_node

        os.environ[SECRET_VARIABLE] = secret
        nodes = resolve_nodes(engine, engine.tensor_parallel_size, os.environ)
        assert nodes is not None
        try:
            serve_node(nodes, None, threading.Event(), print)
        except EngineDead as error:
            log.error("node %d ends: %s", nodes.number, error)
            raise


def application(plan: Plan) -> Any:
    """The deployments of a plan, for `ray.serve.run` or a config file of Ray Serve."""
    if not plan.prefill:
        return _deployment(plan, NAME).bind(plan)
    first, second = plan.of_prefill(), plan.of_decode()
    prompts = _deployment(first, f"{NAME}-prefill").bind(first)
    return _deployment(second, NAME).bind(second, prompts)


def _deployment(plan: Plan, name: str) -> Any:
    from ray import serve

    engine, options = plan.options()
    how_many: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.autoscaling:
        how_many = {"autoscaling_config": plan.autoscaling}
    placed: dict[str, Any] = {}
    if engine.nnodes > 1:
        placed["placement_group_bundles"] = [plan.bundle] * engine.nnodes
        placed["placement_group_strategy"] = "STRICT_SPREAD"
    return serve.deployment(
        serve.ingress()(Replica) if name == NAME else Replica,
        name=name,
        ray_actor_options=plan.resources,
        # The engine queues requests and refuses them when its queue is full.
        health_check_period_s=HEALTH_SECONDS,
        max_ongoing_requests=engine.max_num_seqs + options.max_waiting,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        **how_many,
        **placed,
    )


def serve_on_ray(plan: Plan, say: Say) -> None:
    """Serve on the cluster of RAY_ADDRESS, or on a new one on this machine.

    Args:
        plan: the deployments.
        say: prints a line about the start-up.

    Raises:
        BadConfig: Ray is not installed.
        BadModel: the model folder cannot be served.
        KeyboardInterrupt: after SIGTERM or SIGINT, when the deployments have ended.
    """
    try:
        from ray import serve
    except ImportError:
        raise BadConfig("Ray is not installed", "pip install 'cairn-llm[ray]'") from None
    load_spec(Path(plan.model))
    _, options = plan.options()
    serve.start(http_options={"host": options.host, "port": options.port})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        serve.run(application(plan), name=NAME)
        say(f"ready: http://{options.host}:{options.port}")
        signal.pause()
    finally:
        serve.delete(NAME)
