"""Runs a server that speaks S3, for tests of what is kept in a bucket: moto's, in a process of its own.

`moto[server]` would bring 37 packages, most of which serve other services of AWS; `moto[s3]`, flask and flask-cors are
half of that and enough for this one.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import boto3

_SERVE = """
import logging
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
KEY = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class S3Server:
    """Is a server on a free port of 127.0.0.1 with one empty bucket."""

    bucket = "kv-blocks"

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True)
        try:
            assert self.process.stdout is not None
            with self.process.stdout as output:
                self.endpoint = f"http://127.0.0.1:{int(output.readline())}"
            self.client: Any = boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id="test",
                aws_secret_access_key="test",
                region_name="us-east-1",
            )
            self.client.create_bucket(Bucket=self.bucket)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables by which the server is found."""
        return {**KEY, "AWS_ENDPOINT_URL": self.endpoint}

    def all_keys(self) -> list[str]:
        """Returns the keys of all objects."""
        return [each["Key"] for each in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])]

    def get(self, key: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return body

    def put(self, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=body)

    def empty(self) -> None:
        for key in self.all_keys():
            self.client.delete_object(Bucket=self.bucket, Key=key)

    def stop(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
