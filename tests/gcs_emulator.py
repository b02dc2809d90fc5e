"""A Google Cloud Storage emulator that Orbax, tensorstore and gcsfs can all use.

python tests/gcs_emulator.py PORT [BUCKET]

The package `gcp-storage-emulator` ignores preconditions on generations and the startOffset and endOffset of listings.
tensorstore's OCDBT format needs both, so this wraps the package's handlers. Bucket names have at least 3 characters.
environment.py sets the environment variables that the clients need.
"""

import json
import sys
import threading
from http import HTTPStatus
from http import server as http_server

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

LOCK = threading.RLock()  # a precondition and the request that it guards are one step


def query(request, key):
    """A parameter of the request's address, or None."""
    return request.query.get(key, [None])[0]


def generation(storage, bucket, name):
    """The number of an object's newest version, as text; "0" where there is no such object."""
    try:
        return str(storage.get_file_obj(bucket, name)["generation"])
    except NotFound:
        return "0"


def object_name(handler, request):
    """The object that a request is about, or None. An upload may name it in its body alone."""
    name = request.params.get("object_id") or query(request, "name")
    if name or handler is not objects.insert or not isinstance(request.data, dict):
        return name
    return (request.data.get("meta") or request.data).get("name")


def refusal(request, storage, bucket, name):
    """The status of the answer where a precondition does not hold, or None."""
    wanted, unwanted = query(request, "ifGenerationMatch"), query(request, "ifGenerationNotMatch")
    found = generation(storage, bucket, name) if name else None
    if name and wanted not in (None, found):
        return HTTPStatus.PRECONDITION_FAILED
    if name and unwanted == found:
        reading = request.method == "GET"
        return HTTPStatus.NOT_MODIFIED if reading else HTTPStatus.PRECONDITION_FAILED


def keep_offsets(request, response):
    """Leave in a listing what lies from startOffset up to, not including, endOffset."""
    start, end = query(request, "startOffset") or "", query(request, "endOffset")

    def inside(name):
        return name >= start and (end is None or name < end)

    listing = json.loads(response._content)
    listing["items"] = [item for item in listing.get("items") or [] if inside(item["name"])]
    prefixes = listing.get("prefixes") or []
    listing["prefixes"] = [p for p in prefixes if inside(p) or start.startswith(p)]
    response.json(listing)


def wrap(handler):
    """The handler with preconditions, offsets and the headers that tensorstore reads."""

    def handle(request, response, storage, *args, **kwargs):
        with LOCK:
            bucket = request.params.get("bucket_name")
            name = object_name(handler, request)
            if status := refusal(request, storage, bucket, name):
                response.status = status
                return
            handler(request, response, storage, *args, **kwargs)
            if handler in (objects.download, objects.get) and name and response.status < 300:
                found = storage.get_file_obj(bucket, name)
                response["x-goog-generation"] = str(found["generation"])
                response["x-goog-metageneration"] = str(found.get("metageneration", 1))
                response["x-goog-stored-content-length"] = str(found["size"])
            if handler is objects.ls and response.status == HTTPStatus.OK:
                keep_offsets(request, response)

    return handle


def main(port, bucket=None):
    for _, methods in server.HANDLERS:
        for method, handler in list(methods.items()):
            methods[method] = wrap(handler)
    server.server.HTTPServer = http_server.ThreadingHTTPServer
    server.RequestHandler.protocol_version = "HTTP/1.0"
    server.create_server("127.0.0.1", int(port), in_memory=True, default_bucket=bucket).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
