"""Servers that tests of object stores talk to. Prints an endpoint, then serves until stdin ends.

    emulators.py s3 BUCKET              moto, with a bucket
    emulators.py http FOLDER            aiohttp, which serves the files of a folder with ranges
    emulators.py container URL NAME     makes a container in the Azurite that serves URL, and ends
"""

import asyncio
import contextlib
import io
import logging
import socket
import sys
import threading

AZURITE_ACCOUNT = "devstoreaccount1"
# The key that Azurite and every client of it know; it protects nothing.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class OneAtATime:
    """Answers one request after the other, as moto's state has no locks.

    moto looks whether an object exists, and writes it later: of several conditional writes that run
    in parallel, two succeed. S3 lets one succeed. The body of a request arrives before its turn, so
    a client that stalls holds up nobody.
    """

    def __init__(self, application):
        self.application = application
        self.turn = threading.Lock()

    def __call__(self, environ, start_response):
        body = environ["wsgi.input"]
        ends = environ.get("wsgi.input_terminated")
        length = -1 if ends else int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(body.read(length))
        with self.turn:
            # An object that is replaced closes the file that holds its bytes.
            with contextlib.closing(self.application(environ, start_response)) as answer:
                return list(answer)


def s3(bucket):
    import boto3
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    # It would print a line for every request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server(
        "127.0.0.1",
        0,
        OneAtATime(DomainDispatcherApplication(create_backend_app)),
        threaded=True,
        request_handler=MotoRequestHandler,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_bucket(Bucket=bucket)
    serves(endpoint)
    sys.stdin.read()


def http(folder):
    from aiohttp import web

    async def serve():
        application = web.Application()
        application.router.add_static("/", folder)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        serves(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(serve())


def container(endpoint, name):
    from azure.storage.blob import ContainerClient

    client = ContainerClient(
        f"{endpoint}/{AZURITE_ACCOUNT}",
        name,
        credential={"account_name": AZURITE_ACCOUNT, "account_key": AZURITE_KEY},
    )
    client.create_container()


def serves(endpoint):
    print(f"serves {endpoint}", flush=True)


if __name__ == "__main__":
    {"s3": s3, "http": http, "container": container}[sys.argv[1]](*sys.argv[2:])
