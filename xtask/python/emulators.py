"""Servers that tests of object stores talk to. Prints an endpoint, then serves until stdin ends.

    emulators.py s3 BUCKET              moto, with a bucket
    emulators.py http FOLDER            aiohttp, which serves the files of a folder with ranges
    emulators.py container URL NAME     makes a container in the Azurite that serves URL, and ends
"""

import asyncio
import logging
import socket
import sys

AZURITE_ACCOUNT = "devstoreaccount1"
# The key that Azurite and every client of it know; it protects nothing.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def s3(bucket):
    import boto3
    from moto.server import ThreadedMotoServer

    # It would print a line for every request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
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
