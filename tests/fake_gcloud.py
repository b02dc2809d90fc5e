"""A gcloud for tests: python fake_gcloud.py WORD... reads and changes the cloud whose folder is in FAKE_CLOUD.

Its file cloud.json holds queued resources and nodes as gcloud describes them; `cloud.Cloud` moves their states.
Flags, states and complaints are those of Google Cloud SDK 528: lib/surface/compute/tpus/queued_resources there, and the
reference of the API v2.
"""

import contextlib
import fcntl
import json
import os
import random
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ.get("FAKE_CLOUD", "."))
VALUED = """--node-id --accelerator-type --runtime-version --labels --metadata-from-file --zone --project --format
--network --subnetwork --service-account""".split()
SWITCHES = "--async --force --quiet --spot".split()


@contextlib.contextmanager
def opened(folder):
    """The content of cloud.json, which nobody else changes meanwhile."""
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "cloud.json"
        content = json.loads(path.read_text())
        yield content
        (folder / "part").write_text(json.dumps(content))
        os.replace(folder / "part", path)


def fail(verb, reason):
    sys.stderr.write(f"ERROR: (gcloud.{verb.replace(' ', '.')}) {reason}\n")
    sys.exit(1)


def parsed(words):
    """(the command, its names, {flag: value})."""
    flags, plain = {}, []
    words = iter(words)
    for word in words:
        name, equals, value = word.partition("=")
        if name in VALUED:
            flags[name] = value if equals else next(words)
        elif word in SWITCHES:
            flags[word] = True
        elif word.startswith("-"):
            fail("", f"unrecognized arguments: {word}")
        else:
            plain.append(word)
    n = 2 if plain[:2] == ["storage", "ls"] or plain[:2] == ["storage", "cat"] else 4
    n = 3 if plain[:2] == ["storage", "buckets"] else n
    return " ".join(plain[:n]), plain[n:], flags


def node_of(flags):
    """The node that a request asks for."""
    labels = dict(pair.split("=") for pair in flags["--labels"].split(","))
    node = {"acceleratorType": flags["--accelerator-type"], "labels": labels}
    node["runtimeVersion"] = flags["--runtime-version"]
    if path := flags.get("--metadata-from-file"):
        name, _, path = path.partition("=")
        node["metadata"] = {name: Path(path).read_text()}
    return node


def create(cloud, verb, name, flags):
    where = f"projects/{flags.get('--project', 'p')}/locations/{flags['--zone']}"
    if reason := cloud["refuses"]:
        fail(verb, reason)
    if flags["--zone"] not in cloud["zones"]:
        fail(
            verb,
            f"PERMISSION_DENIED: Permission denied on 'locations/{flags['--zone']}' (or it may not exist)",
        )
    if name in cloud["requests"]:
        fail(verb, f"ALREADY_EXISTS: Resource '{where}/queuedResources/{name}' already exists")
    spec = {"nodeId": flags["--node-id"], "node": node_of(flags)}
    request = {"name": f"{where}/queuedResources/{name}", "state": {"state": "CREATING"}}
    cloud["requests"][name] = request | {"tpu": {"nodeSpec": [spec]}, "since": time.time()}
    cloud["created"] += 1


def describe(cloud, verb, name, flags):
    kind = "queuedResources" if "queued" in verb else "nodes"
    found = cloud["requests" if "queued" in verb else "nodes"].get(name)
    if flags["--zone"] not in cloud["zones"]:
        fail(
            verb,
            f"PERMISSION_DENIED: Permission denied on 'locations/{flags['--zone']}' (or it may not exist)",
        )
    if found is None:
        fail(verb, f"NOT_FOUND: Resource 'projects/p/locations/z/{kind}/{name}' was not found")
    field = flags["--format"].partition("(")[2].rstrip(")")
    if not field:
        print(json.dumps(found))
    elif field == "state":
        print(found["state"])
    else:
        name = field.split(".")[-1]
        ends = found["networkEndpoints"]
        print(";".join(end["ipAddress"] for end in ends if name in end))


def delete(cloud, verb, name, flags):
    request = cloud["requests"].get(name)
    if request is None:
        fail(
            verb,
            f"NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/{name}' was not found",
        )
    if name in cloud["nodes"] and "--force" not in flags:
        fail(verb, f"FAILED_PRECONDITION: queued resource {name} has nodes")
    if request["state"]["state"] != "DELETING":
        request |= {"state": {"state": "DELETING"}, "since": time.time()}


def storage(cloud, verb, name):
    bucket, _, path = name.removeprefix("gs://").partition("/")
    if bucket not in cloud["buckets"]:
        fail(verb, f"gs://{bucket} not found: 404.")
    if verb.endswith("describe"):
        print(cloud["buckets"][bucket])
        return
    place = FOLDER / "buckets" / bucket / path
    if verb.endswith("cat"):
        sys.stdout.write(place.read_text())
    elif place.exists():
        for inside in sorted(place.iterdir()):
            print(f"{name.rstrip('/')}/{inside.name}")
    else:
        fail(verb, "One or more URLs matched no objects.")


def main(words):
    verb, names, flags = parsed(words)
    with opened(FOLDER) as cloud:
        cloud["calls"].append(" ".join(words))
        rng = random.Random(f"{cloud['seed']} {len(cloud['calls'])}")
        fault = rng.random() < cloud["faulty"] and rng.choice(["slow", "unavailable", "lost"])
        for planned in [planned for planned in cloud["faults"] if planned[0] in verb][:1]:
            cloud["faults"].remove(planned)
            fault = planned[1]
    if fault == "slow":
        time.sleep(1)
    if fault == "unavailable":
        fail(verb, "UNAVAILABLE: The service is currently unavailable.")
    with opened(FOLDER) as cloud:
        if verb.startswith("storage"):
            storage(cloud, verb, names[0])
        else:
            action = dict(create=create, describe=describe, delete=delete)[verb.split()[-1]]
            action(cloud, verb, names[0], flags)
    if fault == "lost" and not verb.endswith("describe"):
        fail(verb, "There was a problem: Connection reset by peer")


if __name__ == "__main__":
    main(sys.argv[1:])
