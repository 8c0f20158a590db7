"""Asks the API for a short completion and prints the answer as one JSON object.

Argument (JSON): host, port, model, deadline (seconds), prompt, max_tokens, secrets (path of the
env file that may hold VLLM_API_KEY; the key is read here, so that no command line carries it).
metrics: also print what /metrics says of requests, KV cache and tokens.
Prints {"text", "seconds", "tokens", "metrics"} or {"error", "seconds"}.
"""

from __future__ import annotations

import http.client
import json
import pathlib
import re
import sys
import time
import urllib.error
import urllib.request
from typing import Any, Dict

METRIC = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total|"
    r"generation_tokens_total|prompt_tokens_total)(?:\{[^}]*\})? ([0-9.e+-]+)$",
    re.MULTILINE,
)


def api_key(path: str) -> str | None:
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return None
    keys = [line.partition("=")[2] for line in lines if line.startswith("VLLM_API_KEY=")]
    return keys[-1] if keys else None


def post(wanted: Dict[str, Any], endpoint: str, body: Dict[str, Any]) -> Dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    key = api_key(wanted["secrets"])
    if key:
        headers["Authorization"] = "Bearer " + key
    url = "http://%s:%d/v1/%s" % (wanted["host"], wanted["port"], endpoint)
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    # The address is the API's own; a proxy of the host has no business here.
    with opener.open(request, timeout=wanted["deadline"]) as answer:
        return dict(json.load(answer))


def ask(wanted: Dict[str, Any]) -> Dict[str, Any]:
    body = {"model": wanted["model"], "max_tokens": wanted["max_tokens"], "temperature": 0}
    try:
        messages = [{"role": "user", "content": wanted["prompt"]}]
        answer = post(wanted, "chat/completions", dict(body, messages=messages))
        message = answer["choices"][0]["message"]
        text = message.get("content") or message.get("reasoning_content") or ""
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        detail = error.read().decode(errors="replace")
        if "template" not in detail:
            return {"error": "HTTP 400: %s" % detail[:500]}
        # A base model has no chat template.
        answer = post(wanted, "completions", dict(body, prompt=wanted["prompt"]))
        text = answer["choices"][0]["text"]
    return {"text": text, "tokens": answer.get("usage", {}).get("completion_tokens")}


def answer(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Ask; return {"text", "seconds", "tokens"} or {"error", "seconds"}."""
    began = time.monotonic()
    try:
        result = ask(wanted)
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")
        result = {"error": "HTTP %d: %s" % (error.code, detail[:500])}
    except urllib.error.URLError as error:
        result = {"error": str(error.reason)}
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
        result = {"error": "%s: %s" % (type(error).__name__, error)}
    result["seconds"] = round(time.monotonic() - began, 3)
    if wanted.get("metrics"):
        result["metrics"] = metrics(wanted)
    return result


def metrics(wanted: Dict[str, Any]) -> Dict[str, float]:
    """Sums over all engines of vLLM's own numbers, without the prefix; {} without an API."""
    url = "http://%s:%d/metrics" % (wanted["host"], wanted["port"])
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=min(5, wanted["deadline"])) as page:
            text = page.read().decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    found: Dict[str, float] = {}
    for name, value in METRIC.findall(text):
        found[name] = found.get(name, 0) + float(value)
    return found


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[2]))))
