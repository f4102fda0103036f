"""The few requests to the API server that the operator makes itself; kopf does the watching.

Every answer is either the object or one of the errors below, and nothing here retries: who asked
decides. No request outlives its time-out, and no error's text holds a credential.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import aiohttp
import kopf

from rowlock_operator.model import GROUP, PLURAL, VERSION

Object = dict[str, Any]  # Any: JSON of the API server

PAGE_ITEMS: Final = 250
"""Items of one page of a list: a page of large BatchJobs stays within a few megabytes."""
_LOGIN_SECONDS: Final = 60.0
"""How long credentials are believed; kubelet renews a pod's token well before its end."""
_REQUEST_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 5.0
_TEXT_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, by the path under which the API server serves it."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, sub: str | None = None) -> str:
        """The path of one object, or of the list of them; without namespace that of the cluster."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        inside = f"/namespaces/{namespace}" if namespace is not None else ""
        rest = "".join(f"/{part}" for part in (name, sub) if part is not None)
        return f"{root}{inside}/{self.plural}{rest}"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


BATCHJOBS: Final = Resource(GROUP, VERSION, PLURAL)
JOBS: Final = Resource("batch", "v1", "jobs")
PODS: Final = Resource("", "v1", "pods")
EVENTS: Final = Resource("", "v1", "events")
_REVIEWS: Final = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews")


class ApiError(Exception):
    """The API server refused a request, or could not be asked."""

    def __init__(self, what: str, status: int, message: str) -> None:
        """Say what was asked, what the status was (0: there was no answer) and why."""
        super().__init__(what, status, message)
        self.what = what
        self.status = status
        self.message = message

    def __str__(self) -> str:
        status = f"{self.status} " if self.status else ""
        return f"{self.what}: {status}{self.message}"


class Missing(ApiError):
    """404: there is no such object, or nobody serves its kind."""


class Conflict(ApiError):
    """409: the object exists already, or has changed since it was read."""


class Forbidden(ApiError):
    """403: the operator may not do this, or the namespace is being deleted."""


class Invalid(ApiError):
    """400 or 422: the API server does not accept the object. It will not do so later either."""


class Gone(ApiError):
    """410: the rest of a list has expired."""


class Unreachable(ApiError):
    """There was no answer, or one that says to try later."""


_KINDS: Final[Mapping[int, type[ApiError]]] = {
    400: Invalid,
    403: Forbidden,
    404: Missing,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Unreachable,
    500: Unreachable,
    502: Unreachable,
    503: Unreachable,
    504: Unreachable,
}


def credentials(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo:
    """The credentials of the pod's service account, or else of the kubeconfig, read anew.

    Raises:
        kopf.LoginError: There are none.
    """
    try:
        found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(
            settings=settings
        )
    except (OSError, LookupError, ValueError) as error:
        raise kopf.LoginError(f"the credentials cannot be read: {type(error).__name__}") from error
    if found is None:
        raise kopf.LoginError("there is no service account and no kubeconfig (set KUBECONFIG)")
    return found


class Kubernetes:
    """The API server. Use it in `async with`, which closes its connections."""

    def __init__(self, settings: kopf.OperatorSettings) -> None:
        self._settings = settings
        self._info: kopf.ConnectionInfo | None = None
        self._session: aiohttp.ClientSession | None = None
        # The session before: requests that use it may still be under way when the token changes.
        self._retired: aiohttp.ClientSession | None = None
        self._read_at = float("-inf")
        self._login = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        sessions, self._session, self._retired = (self._session, self._retired), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    # -- objects -----------------------------------------------------------------------------------

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object.

        Raises:
            Missing: There is none.
            ApiError: The request failed.
        """
        return await self._request("GET", resource.path(namespace, name))

    async def list_all(
        self, resource: Resource, namespace: str | None, *, labels: str | None = None
    ) -> list[Object]:
        """All objects of a kind: the whole list or an error, never a part of it.

        Args:
            resource: The kind.
            namespace: Only in this one; None: in all.
            labels: A label selector.

        Raises:
            Missing: Nobody serves this kind.
            ApiError: The request failed.
        """
        try:
            return await self._pages(resource, namespace, labels)
        except Gone:
            # The snapshot of the first page has expired: half of an older list would be a lie.
            return await self._pages(resource, namespace, labels)

    async def create(
        self, resource: Resource, namespace: str, manifest: Mapping[str, Any]
    ) -> Object:
        """Create an object.

        Raises:
            Conflict: One of this name is there already.
            Forbidden: The operator may not, or the namespace is being deleted.
            ApiError: The request failed.
        """
        return await self._request("POST", resource.path(namespace), body=dict(manifest))

    async def patch_status(
        self,
        namespace: str,
        name: str,
        *,
        resource_version: str,
        patch: Mapping[str, Any],
    ) -> Object:
        """Change the status of a BatchJob as it was read.

        Args:
            namespace: The namespace of the BatchJob.
            name: Its name.
            resource_version: Of the BatchJob that the new status was made from.
            patch: A merge patch of the status.

        Raises:
            Conflict: The BatchJob has changed since.
            Missing: It is gone.
            ApiError: The request failed.
        """
        body = {
            "metadata": {"resourceVersion": resource_version},
            "status": patch,
        }
        return await self._request(
            "PATCH",
            BATCHJOBS.path(namespace, name, "status"),
            body=body,
            content_type="application/merge-patch+json",
        )

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str,
        resource_version: str | None = None,
    ) -> None:
        """Delete this very object, with what it owns. One that is gone already is no error.

        Args:
            resource: The kind.
            namespace: Its namespace.
            name: Its name.
            uid: Another object of the same name stays.
            resource_version: If given, one that has changed since stays, too.

        Raises:
            Conflict: It is another one, or has changed.
            ApiError: The request failed.
        """
        preconditions = {"uid": uid}
        if resource_version is not None:
            preconditions["resourceVersion"] = resource_version
        body = {"propagationPolicy": "Background", "preconditions": preconditions}
        try:
            await self._request("DELETE", resource.path(namespace, name), body=body)
        except Missing:
            return

    async def served(self, resource: Resource) -> frozenset[str]:
        """What may be done with a kind at all, whoever asks; empty if nobody serves it.

        While its definition is being deleted a kind loses the verbs that would make new objects.
        """
        try:
            found = await self._request("GET", f"/apis/{resource.group}/{resource.version}")
        except Missing:
            return frozenset()
        for one in found.get("resources") or ():
            if one.get("name") == resource.plural:
                return frozenset(one.get("verbs") or ())
        return frozenset()

    async def may(
        self, verb: str, resource: Resource, namespace: str | None, sub: str | None = None
    ) -> bool:
        """Whether the operator has a right, as the API server itself judges.

        Args:
            verb: For example "patch".
            resource: The kind.
            namespace: Where; None: in all.
            sub: A subresource, for example "status".

        Raises:
            Forbidden: It may not even ask, which is unusual.
            ApiError: The request failed.
        """
        asked = {
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "subresource": sub or "",
            "namespace": namespace or "",
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        found = await self._request("POST", _REVIEWS.path(None), body=body)
        status: Object = found.get("status") or {}
        return status.get("allowed") is True

    # -- requests ----------------------------------------------------------------------------------

    async def _pages(
        self, resource: Resource, namespace: str | None, labels: str | None
    ) -> list[Object]:
        found: list[Object] = []
        rest = ""
        while True:
            query = {"limit": str(PAGE_ITEMS)}
            if labels:
                query["labelSelector"] = labels
            if rest:
                query["continue"] = rest
            page = await self._request("GET", resource.path(namespace), query=query)
            found.extend(page.get("items") or ())
            meta: Object = page.get("metadata") or {}
            rest = str(meta.get("continue") or "")
            if not rest:
                return found

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> Object:
        what = f"{method} {path}"
        for fresh in (False, True):
            session, server = await self._connected(fresh=fresh)
            try:
                async with session.request(
                    method,
                    server + path,
                    params=query,
                    data=None if body is None else json.dumps(body, default=dict).encode(),
                    headers={"Accept": "application/json", "Content-Type": content_type},
                ) as response:
                    if response.status == 401 and not fresh:
                        continue  # the token was renewed meanwhile: once more with the new one
                    text = await response.text()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                raise Unreachable(what, 0, reason[:_TEXT_MAX]) from error
            return _answer(what, response.status, text)
        raise AssertionError("the second try always answers")

    async def _connected(self, *, fresh: bool) -> tuple[aiohttp.ClientSession, str]:
        """A session with today's credentials, and the server's address."""
        async with self._login:
            old = time.monotonic() - self._read_at > _LOGIN_SECONDS
            if self._session is None or self._info is None or fresh or old:
                try:
                    info = credentials(self._settings)
                except kopf.LoginError as error:
                    raise Unreachable("log in to the API server", 0, str(error)) from error
                self._read_at = time.monotonic()
                if info != self._info or self._session is None:
                    if self._retired is not None:
                        await self._retired.close()
                    self._retired, self._session, self._info = self._session, _session(info), info
            assert self._info is not None
            return self._session, str(self._info.server).rstrip("/")


def _session(info: kopf.ConnectionInfo) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=16, ssl=info.as_ssl_context()),
        headers={"User-Agent": "rowlock-operator", **info.as_http_headers()},
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS, connect=_CONNECT_SECONDS),
    )


def _answer(what: str, status: int, text: str) -> Object:
    answer: Object = {}
    try:
        answer = json.loads(text) if text.startswith("{") else {}
    except ValueError:
        pass  # a proxy in between that speaks HTML
    if 200 <= status < 300:
        return answer
    message = str(answer.get("message") or text or "no reason given")[:_TEXT_MAX]
    raise _KINDS.get(status, ApiError)(what, status, message)
