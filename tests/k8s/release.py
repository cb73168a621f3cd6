"""Objects of a rendered chart: by kind, by component, down to containers and their flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment, a LeaderWorkerSet or a bare Pod, as far as its pods go."""

    name: str
    component: str
    labels: Object
    spec: Object
    """The pods' spec; of a group, the leader's."""
    owner: Object

    def container(self, name: str) -> Object:
        """A container by its name."""
        return next(container for container in self.spec["containers"] if container["name"] == name)


@dataclass(frozen=True, slots=True)
class Release:
    """All objects of a release, those of its hooks too, and its notes."""

    objects: tuple[Object, ...]
    notes: str

    def of_kind(self, kind: str) -> list[Object]:
        """Every object of a kind."""
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        """The object of this kind and name."""
        return next(found for found in self.of_kind(kind) if found["metadata"]["name"] == name)

    def workloads(self) -> list[Workload]:
        """Objects that make pods, the test pod included."""
        return [
            Workload(o["metadata"]["name"], _labels(t)[_COMPONENT], _labels(t), t["spec"], o) for o, t in self._pods()
        ]

    def workload_of(self, service: str) -> Workload:
        """The workload in whose pods a service runs."""
        return next(w for w in self.workloads() if any(c["name"] == service for c in w.spec["containers"]))

    def flags(self, service: str) -> list[str]:
        """The flags that a service's program is started with."""
        return list(self.workload_of(service).container(service)["args"])

    def pod_templates(self) -> Iterator[Object]:
        """Every pod template there is, each of a group's."""
        for found in self.objects:
            yield from (template for _, template in _templates(found))

    def _pods(self) -> Iterator[tuple[Object, Object]]:
        for found in self.objects:
            yield from ((found, template) for role, template in _templates(found) if role != "worker")


_COMPONENT = "app.kubernetes.io/component"


def parse(manifest: str, notes: str) -> Release:
    """The objects of a manifest."""
    # libyaml's loader is ten times faster; PyYAML's wheels have it.
    return Release(tuple(found for found in yaml.load_all(manifest, yaml.CSafeLoader) if found), notes)


def _labels(found: Object) -> Object:
    labels: Object = found["metadata"]["labels"]
    return labels


def _templates(found: Object) -> list[tuple[str, Object]]:
    match found["kind"]:
        case "Deployment":
            return [("pod", found["spec"]["template"])]
        case "Pod":
            return [("pod", found)]
        case "LeaderWorkerSet":
            group = found["spec"]["leaderWorkerTemplate"]
            return [("leader", group["leaderTemplate"]), ("worker", group["workerTemplate"])]
        case _:
            return []
