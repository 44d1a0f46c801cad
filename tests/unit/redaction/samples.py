"""Made-up secrets of every known kind, and output of operations that holds none.

The secrets are put together from parts, so that no scanner of repositories takes this file for a leak.
"""

from __future__ import annotations

import base64
import hashlib
import json

ALNUM = "a1B2c3D4e5F6g7H8i9J0kLmNoPqRsTuVwXyZ"
HEX = hashlib.sha256(b"made up").hexdigest()
PEM = (
    "-----BEGIN RSA "
    + "PRIVATE KEY-----\n"
    + "\n".join([(ALNUM * 2)[:64]] * 6)
    + "\nabcd1234==\n-----END RSA PRIVATE KEY-----"
)
_JWT = ".".join(
    base64.urlsafe_b64encode(part).rstrip(b"=").decode()
    for part in (b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890","name":"Ana"}', hashlib.sha256(b"s").digest())
)

TOKENS: dict[str, list[str]] = {
    "github_token": ["gh" + letter + "_" + ALNUM for letter in "pousr"] + ["github" + "_pat_" + ALNUM + "_" + ALNUM],
    "gitlab_token": ["gl" + "pat-" + ALNUM[:20], "gl" + "rt-" + ALNUM[:20], "GR" + "1348941" + ALNUM[:20]],
    "slack_token": ["xo" + "xb-123456789012-123456789012-" + ALNUM[:24], "xa" + "pp-1-A01BCDEFGHI-123456789-" + HEX],
    "slack_webhook": ["hooks.slack" + ".com/services/T00000000/B00000000/" + ALNUM[:24]],
    "aws_access_key": ["AK" + "IAQ3EGUJ5NSZ2X4WVB", "AS" + "IAQ3EGUJ5NSZ2X4WVB"],
    "google_api_key": ["AI" + "za" + ALNUM[:35]],
    "google_token": ["ya" + "29." + ALNUM],
    "google_client_secret": ["GOC" + "SPX-" + ALNUM[:28]],
    "stripe_key": ["sk" + "_live_" + ALNUM[:24], "rk" + "_test_" + ALNUM[:24], "wh" + "sec_" + ALNUM[:32]],
    "anthropic_key": ["sk" + "-ant-api03-" + ALNUM * 2 + "-AA"],
    "openai_key": ["sk" + "-proj-" + ALNUM, "sk" + "-" + ALNUM + ALNUM[:12]],
    "huggingface_token": ["hf" + "_" + "abcdefghijKLMNOPQRSTuvwxyzABCDEFGH"],
    "llm_key": ["gs" + "k_" + ALNUM * 2, "xa" + "i-" + ALNUM * 2],
    "jwt": [_JWT],
    "npm_token": ["np" + "m_" + ALNUM],
    "pypi_token": ["py" + "pi-AgEIcHlwaS5vcmc" + ALNUM * 2],
    "docker_token": ["dc" + "kr_pat_" + ALNUM[:27]],
    "digitalocean_token": ["do" + "p_v1_" + HEX],
    "databricks_token": ["da" + "pi" + HEX[:32]],
    "sendgrid_key": ["S" + "G." + ALNUM[:22] + "." + ALNUM + ALNUM[:7]],
    "vault_token": ["hv" + "s." + ALNUM * 2],
    "grafana_token": ["gl" + "sa_" + ALNUM[:32] + "_" + HEX[:8]],
    "shopify_token": ["sh" + "pat_" + HEX[:32]],
    "atlassian_token": ["AT" + "ATT3" + ALNUM * 3],
    "linear_key": ["li" + "n_api_" + ALNUM + ALNUM[:4]],
    "sentry_token": ["sn" + "tryu_" + HEX],
    "new_relic_key": ["NR" + "AK-" + "A1B2C3D4E5F6G7H8I9J0K1L2M3N"],
    "twilio_key": ["S" + "K" + HEX[:32]],
    "openshift_token": ["sha" + "256~" + ALNUM + ALNUM[:7]],
    "pulumi_token": ["pu" + "l-" + HEX[:40]],
    "age_key": ["AGE-SECRET" + "-KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" + "QPZRY9X8GF2TVDW0S3JN54KHCE"],
    "supabase_key": ["sb" + "_secret_" + ALNUM],
    "tailscale_key": ["ts" + "key-auth-" + ALNUM],
    "private_key": [PEM, PEM.replace("\n", "\\n"), base64.b64encode(PEM.encode()).decode()],
}
"""Kind → tokens that are secrets wherever they stand."""

# (text, the secret in it, kind)
IN_CONTEXT: list[tuple[str, str, str]] = [
    ("password=hunter2", "hunter2", "password"),
    ("DB_PASSWORD=hunter2 DB_HOST=db", "hunter2", "password"),
    ("spring.datasource.password: Pa55,w0rd", "Pa55", "password"),
    ('{"dbPassword":"s3 cret, with; signs"}', "s3 cret, with; signs", "password"),
    ('"{\\"password\\": \\"hunter2\\"}"', "hunter2", "password"),
    ("{'passphrase': 'correct horse'}", "correct horse", "password"),
    ("REDIS_PASS=hunter2", "hunter2", "password"),
    ("<password>hunter2</password>", "hunter2", "password"),
    ("Server=db;User Id=app;Pwd=hunter2;", "hunter2", "password"),
    ("AccountName=x;AccountKey=" + "a1B2" * 20 + "==;", "a1B2" * 20 + "==", "api_key"),
    ("api_key: Zx81kq02mmVv", "Zx81kq02mmVv", "api_key"),
    ("X-Api-Key: 0a1b2c3d-1111-2222-3333-444455556666", "0a1b2c3d-1111-2222-3333-444455556666", "api_key"),
    (
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzzzz",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzzzz",
        "api_key",
    ),
    ("CLIENT_SECRET=" + HEX[:32], HEX[:32], "secret"),
    ("session_token: 'abc123def456ghi789'", "abc123def456ghi789", "token"),
    ("Authorization: Bearer abcdef1234567890", "abcdef1234567890", "authorization"),
    ("curl -H 'Authorization: Basic dXNlcjpodW50ZXIy'", "dXNlcjpodW50ZXIy", "authorization"),
    ("sent with bearer 0123456789abcdef0123", "0123456789abcdef0123", "authorization"),
    ("postgresql://app:hunter2@db.example.com:5432/shop", "hunter2", "password"),
    ("redis://:p4ss@w0rd@cache:6379/0", "p4ss@w0rd", "password"),
    ('{"auths":{"r.example.com":{"auth":"dXNlcjpodW50ZXIy"}}}', "dXNlcjpodW50ZXIy", "password"),
    ("https://x.blob.example.com/c?sv=2020&sig=a1B2c3D4e5%2F6g7H8&se=2030", "a1B2c3D4e5", "signature"),
]

_DIGEST = "sha256:" + HEX
_UUID = "550e8400-e29b-41d4-a716-446655440000"
_B64 = base64.b64encode(bytes(range(256)) * 3).decode()

HARMLESS: list[str] = [
    f"commit {HEX[:40]} (HEAD -> main, tag: v1.4.2)",
    f"Image: registry.example.com/shop/checkout@{_DIGEST}",
    f"trace_id={_UUID} span_id={HEX[:16]} request-id: {_UUID}",
    f"payload={_B64}",
    "2026-11-30T00:10:43.123Z INFO  [main] c.e.OrderController - GET /api/v1/orders 200 12ms",
    "checkout-api-7d9c5b6f4-m4q7t   1/1   Running   0   3d4h   10.0.12.7   node-1",
    'level=info msg=reconciling secret=default/my-tls-secret-v2 controller=cert-manager token="" password=""',
    "    secretName: checkout-tls\n    secretKeyRef:\n      name: db\n      key: password",
    "imagePullSecrets:\n- name: registry-credentials\n",
    "serviceAccountToken:\n  path: token\n  expirationSeconds: 3607",
    '{"prompt_tokens": 1234, "completion_tokens": 56, "max_tokens": 4096, "token_type": "bearer"}',
    '{"next_page_token": "a1B2c3D4e5F6g7H8", "continuationToken": "a1B2c3D4e5F6g7H8", "nextPageToken":"a1B2c3D4"}',
    "Unexpected token '<', \"<!DOCTYPE \"... is not valid JSON",
    "Failed password for root from 203.0.113.9 port 22 ssh2",
    "password: required, must have 12 characters",
    "Password: ********",
    "export DB_PASSWORD=$DB_PASSWORD API_KEY=${API_KEY} TOKEN=$(cat /run/token)",
    "password = settings.database.password\ntoken = get_token(user)\nsecret = os.environ['SECRET']",
    "password: {{ .Values.db.password }}",
    "PasswordAuthentication no\nPermitRootLogin prohibit-password",
    "http://prometheus.monitoring.svc:9090/api/v1/query?query=up ssh://git@github.com/shop/web.git mailto:a@b.example",
    "postgres://user:password@localhost/db  redis://localhost:6379/0  https://host:8443/a@b",
    "-----BEGIN CERTIFICATE-----\nMIIDdzCCAl+gAwIBAgIEAgAAuTANBgkqhkiG9w0BAQUFAD\n-----END CERTIFICATE-----",
    "The file starts with -----BEGIN RSA PRIVATE KEY----- and ends with its END line (do not paste it).",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB4tZ1d8f7Wm0000000000000000000000000000000 ana@laptop",
    "sk-learn 1.5, task-runner-abcdefghijklmnopqrstuvwxyz012345, ask-me-anything",
    "Asia/Tokyo ACCALIMATION AKIA is a prefix; eyJ too; xoxo; gh_pages; hf_hub",
    'WWW-Authenticate: Bearer realm="registry",service="registry"; bearer authentication failed',
    "authorization: rbac.authorization.k8s.io/v1 authorization-mode=Node,RBAC",
    "monkey: 1a2b3c4d5e6f, primary key: 1a2b3c4d5e6f, keyboard=1a2b3c4d5e6f cache_key=1a2b3c4d5e6f7a8b",
    'etag: W/"' + HEX[:32] + '" md5=' + HEX[:32] + " version=1.27.3-gke.100",
    "apiVersion: v1\nkind: ConfigMap\ndata:\n  mode: cHJvZHVjdGlvbg==\n  other: x\n",
]

SECRET_YAML = """\
apiVersion: v1
items:
- apiVersion: v1
  data:
    mode: cHJvZHVjdGlvbg==
  kind: ConfigMap
- apiVersion: v1
  data:
    db-host: cG9zdGdyZXMuc3ZjLmxvY2Fs
    tls.crt: "Y2VydGlmaWNhdGU="
  kind: Secret
  metadata:
    annotations:
      kubectl.kubernetes.io/last-applied-configuration: |
        {"apiVersion":"v1","data":{"db-host":"cG9zdGdyZXMuc3ZjLmxvY2Fs"},"kind":"Secret","metadata":{"name":"db"}}
    name: db
kind: List
---
kind: Secret
metadata:
  name: other
stringData:
  config: |
    first line of it
    second line
  plain: something
type: Opaque
"""
SECRET_VALUES = ("cG9zdGdyZXMuc3ZjLmxvY2Fs", "Y2VydGlmaWNhdGU=", "first line of it", "second line", "something")
SECRET_JSON = json.dumps(
    {
        "kind": "List",
        "items": [
            {"apiVersion": "v1", "data": {"mode": "cHJvZHVjdGlvbg=="}, "kind": "ConfigMap"},
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "x"},
                "data": {"host": "cG9zdGdyZXMuc3Zj", "e": ""},
            },
        ],
    },
    indent=2,
)
