"""A TPU slice, as gcloud asks for it, describes it and deletes it. Needs no packages.

A slice is asked for as a queued resource, which has the name of its one node. Google makes names unique in a project
and a zone, so there are never two slices of one name. What the states mean:
cloud.google.com/tpu/docs/queued-resources, and .../docs/reference/rest/v2/projects.locations.queuedResources and
projects.locations.nodes beside it.
"""

import json
import os
import re
import subprocess
from typing import NamedTuple

from runtime.messages import UserError

LABEL = "moe-pretraining-keeper"  # on each node, with the keeper's own number: only then it may delete the slice
# {chip: the runtime version for jax}, from cloud.google.com/tpu/docs/runtimes; older chips have that of v4
VERSIONS = dict(v6e="v2-alpha-tpuv6e", v5p="v2-alpha-tpuv5", v5e="v2-alpha-tpuv5-lite")
OLDER = "tpu-ubuntu2204-base"
QUEUED = {"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"}
COMING = {
    "CREATING",
    "STARTING",
    "RESTARTING",
    "REIMAGING",
}  # states of a node that becomes READY by itself
UNSPECIFIED = "STATE_UNSPECIFIED"
MAINTENANCE = "UNHEALTHY_MAINTENANCE"  # health of a node whose state may still be READY
# gcloud's complaints about what may pass: its network, Google's service, too many requests a minute
PASSING = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL\b|ABORTED|CANCELLED|ALREADY_EXISTS|UNKNOWN:|HttpError|per minute|"
    r"[Cc]onnect|[Tt]imed? ?out|network|Max retries|TransportError|no reason",
)
ABSENT = re.compile(r"NOT_FOUND|was not found|matched no objects|not found: 404")
DEFINITE = re.compile(r"INVALID_ARGUMENT|PERMISSION_DENIED|FAILED_PRECONDITION|UNAUTHENTICATED")
# what a request that FAILED says where asking again would not help
HOPELESS = re.compile(
    r"[Qq]uota|[Pp]ermission|[Ii]nvalid|not (found|supported|valid|exist|allowed)"
)
PATIENCE = 300  # seconds that a gcloud may take


class Passing(Exception):
    """gcloud failed for a reason that may pass. Whether its request was fulfilled is not known."""


class Refused(Exception):
    """gcloud's definite answer."""


class Absent(Exception):
    """What gcloud should describe does not exist."""


class View(NamedTuple):
    """What Google says about a slice at one moment."""

    kind: str  # none, queued, ready, lost, deleting, or foreign: another than the keeper made it
    words: str = ""  # in Google's own words
    born: str = ""  # when its node was made; another one is another slice
    is_paid: bool = False  # its node exists
    is_hopeless: bool = False  # lost, for a reason for which asking again would not help


def gcloud(*words, held=()):
    """What gcloud prints. Without a terminal it asks no question. held: file descriptors that it inherits."""
    pipes = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, pass_fds=held)
    # a session of its own: Ctrl-C must not end a request whose answer is needed
    try:
        done = subprocess.run(
            ["gcloud", *words, "--quiet"], timeout=PATIENCE, start_new_session=True, **pipes
        )
    except subprocess.TimeoutExpired:
        raise Passing(f"gcloud gave no answer within {PATIENCE} s") from None
    except OSError:
        raise UserError(
            "gcloud, which asks for slices, is not installed here; see cloud.google.com/sdk"
        ) from None
    if done.returncode == 0:
        return done.stdout
    reason = reason_of(done.stderr)
    if ABSENT.search(reason):
        raise Absent(reason)
    passes = PASSING.search(reason) and not DEFINITE.search(reason)
    raise (Passing if passes else Refused)(reason)


def reason_of(complaint):
    """Why gcloud failed, from what it wrote on stderr."""
    lines = [line for line in complaint.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["gcloud gives no reason"])[-1]
    if said := re.search(r'HttpError.*"message": "([^"]*)"', last):
        last = f"HttpError: {said[1]}"
    return re.sub(r"^ERROR: (\(gcloud[\w.-]*\) )?", "", last).strip().rstrip(".")


class Slice(NamedTuple):
    """The slice of cluster.env."""

    name: str
    where: tuple  # the words that name its zone and project
    asked: tuple  # the words that say what is asked for
    owner: str  # the keeper's own number

    def look(self):
        """A `View` of the slice. Raises Passing and Refused."""
        request, node = self._describe("queued-resources"), None
        if request is None:
            node = self._describe("tpu-vm")
            if node is None:
                return View("none")
            is_ours = self._is_ours(node)
            return View("deleting" if is_ours else "foreign", "a node", is_paid=is_ours)
        if not self._is_ours(request["tpu"]["nodeSpec"][0]["node"]):
            return View("foreign")
        state = state_of(request["state"])
        if state in QUEUED:
            return View("queued", state)
        if state == "DELETING":
            return View("deleting", state)
        if state != "ACTIVE":
            why = failure_of(request["state"])
            words = f"{state} ({why})" if why else state
            return View("lost", words, is_hopeless=bool(why and HOPELESS.search(why)))
        node = self._describe("tpu-vm")
        return View("lost", "its node is gone") if node is None else view_of(node)

    def _describe(self, kind):
        """What gcloud knows of the queued resource or of the node, None where there is none."""
        words = ["compute", "tpus", kind, "describe", self.name, *self.where, "--format=json"]
        try:
            return json.loads(gcloud(*words))
        except Absent:
            return None
        except ValueError:
            raise Passing("gcloud's answer is cut off") from None

    def _is_ours(self, node):
        return node.get("labels", {}).get(LABEL) == self.owner

    def ask(self, keys, held):
        """Ask Google for the slice. keys: a file of public ssh keys that its hosts accept, or None."""
        words = ["--node-id", self.name, *self.asked, "--labels", f"{LABEL}={self.owner}"]
        if keys:
            words += ["--metadata-from-file", f"ssh-keys={keys}"]
        words += [*self.where, "--async"]
        try:
            gcloud("compute", "tpus", "queued-resources", "create", self.name, *words, held=held)
        except Absent as e:  # a zone, a network or a runtime version
            raise Refused(str(e)) from None

    def delete(self, held):
        """Delete the queued resource and its node. The caller has seen that they are ours."""
        words = ["compute", "tpus", "queued-resources", "delete", self.name, *self.where]
        try:
            gcloud(*words, "--force", "--async", held=held)
        except Absent:
            pass

    def deletion(self):
        """The command by which a person deletes it."""
        return f"gcloud compute tpus queued-resources delete {self.name} {' '.join(self.where)} --force"


def state_of(described):
    """A state as Google names it. Raises Passing where it does not: nothing is deleted for that."""
    state = described.get("state", UNSPECIFIED)
    if state == UNSPECIFIED:
        raise Passing("gcloud names no state")
    return state


def failure_of(state):
    """Why a request FAILED, in Google's words; "" where it does not say."""
    return state.get("failedData", {}).get("error", {}).get("message", "").strip().rstrip(".")


def view_of(node):
    """A `View` of the node of an ACTIVE request."""
    state, health = state_of(node), node.get("health")
    if health == MAINTENANCE:
        return View("lost", f"{state}, {health}", is_paid=True)
    if state in COMING:
        return View("queued", f"its node is {state}", is_paid=True)
    kind = "ready" if state == "READY" else "lost"
    words = state if kind == "ready" else f"its node is {state}"
    return View(kind, words, node.get("createTime", ""), is_paid=True)


def slice_of_settings(chip, owner):
    """The `Slice` that the settings in the environment describe; chip: that of TPU_TYPE."""
    setting = os.environ.get
    # Google calls v5e-8 v5litepod-8
    kind = setting("TPU_TYPE", "").lower().replace("v5e-", "v5litepod-")
    version = setting("TPU_VERSION") or VERSIONS.get(chip.name, OLDER)
    asked = ["--accelerator-type", kind, "--runtime-version", version]
    if setting("SPOT"):
        asked.append("--spot")
    for flag in ("network", "subnetwork", "service-account"):
        if value := setting(flag.upper().replace("-", "_")):
            asked += [f"--{flag}", value]
    where = [] if not setting("PROJECT") else ["--project", setting("PROJECT")]
    return Slice(setting("TPU_NAME"), ("--zone", setting("ZONE"), *where), tuple(asked), owner)
