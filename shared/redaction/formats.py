"""The shapes of secrets that are known without any setting: tokens by their prefix, words that announce a value.

Each row names where its shape comes from: the issuer's own documentation, or ``gitleaks`` for the rule of that name in
gitleaks 8.30 (``config/gitleaks.toml``), the best kept public catalogue. Lengths are lower bounds where the
issuer reserves the right to grow. A token's prefix is looked for in lower case first and then compared exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TokenFormat:
    """``kind`` names the marker; ``shape`` is matched at the prefix, within one run of token characters. ``apart``: the
    prefix must not stand inside a longer word (needed where base64 or a name could hold it)."""

    kind: str
    prefixes: tuple[str, ...]
    shape: str
    apart: bool = True


_GITLAB: Final = "glpat- gldt- glrt- glcbt- glptt- glagent- glsoat- glft- glimt- gloas- glffct-"

TOKENS: Final = (
    # docs.github.com, "GitHub's token formats"
    TokenFormat("github_token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"gh[pousr]_[A-Za-z0-9]{30}\w*", False),
    TokenFormat("github_token", ("github_pat_",), r"github_pat_\w{50,}", False),
    # docs.gitlab.com, "Token overview"; the routable form adds a dot and a check sum
    TokenFormat("gitlab_token", tuple(_GITLAB.split()), r"gl[a-z]{2,5}-[\w-]{20,}(?:\.[\w-]+)*", False),
    TokenFormat("gitlab_token", ("GR1348941",), r"GR1348941[\w-]{20,}"),
    # docs.slack.dev, "Token types"; gitleaks slack-*
    TokenFormat("slack_token", ("xox",), r"xox[a-z](?:\.xox[bp])?-[A-Za-z0-9-]{10,}", False),
    TokenFormat("slack_token", ("xapp-",), r"xapp-\d-[A-Za-z0-9-]{20,}", False),
    TokenFormat("slack_webhook", ("hooks.slack.com/",), r"hooks\.slack\.com/[a-z]+/[A-Za-z0-9+/]{30,}", False),
    # AWS IAM, "Understanding unique ID prefixes"; gitleaks aws-access-token, aws-amazon-bedrock-api-key-long-lived
    TokenFormat("aws_access_key", ("AKIA", "ASIA", "ABIA", "ACCA"), r"A[KSBC][IC]A[A-Z0-9]{16}(?!\w)"),
    TokenFormat("aws_bedrock_key", ("ABSK",), r"ABSK[A-Za-z0-9+/]{100,}=*"),
    # gitleaks gcp-api-key; Google's OAuth access tokens and client secrets by their prefixes
    TokenFormat("google_api_key", ("AIza",), r"AIza[\w-]{35}(?![\w-])"),
    TokenFormat("google_token", ("ya29.",), r"ya29\.[\w-]{20,}"),
    TokenFormat("google_client_secret", ("GOCSPX-",), r"GOCSPX-[\w-]{28}(?![\w-])"),
    # docs.stripe.com, "API keys", "Webhooks"
    TokenFormat("stripe_key", ("sk_live_", "sk_test_", "rk_live_", "rk_test_"), r"[sr]k_[a-z]{4}_[A-Za-z0-9]{10,}"),
    TokenFormat("stripe_key", ("whsec_",), r"whsec_[A-Za-z0-9+/]{24,}=*"),
    # gitleaks anthropic-*, openai-api-key; others (OpenRouter, DeepSeek, Moonshot) copy the prefix
    TokenFormat("anthropic_key", ("sk-ant-",), r"sk-ant-[\w-]{20,}"),
    TokenFormat("openai_key", ("sk-proj-", "sk-svcacct-", "sk-admin-"), r"sk-[a-z]+-[\w-]{20,}"),
    TokenFormat("openai_key", ("sk-",), r"sk-(?:or-v1-)?[A-Za-z0-9]{32,}(?![\w-])"),
    TokenFormat("huggingface_token", ("hf_",), r"hf_[A-Za-z]{30,}(?!\w)"),
    TokenFormat("llm_key", ("gsk_", "xai-", "pplx-", "r8_"), r"(?:gsk_|xai-|pplx-|r8_)[A-Za-z0-9]{36,}"),
    # RFC 7519 and 7516: base64url of {"…, then as many parts; gitleaks jwt, grafana-api-key
    TokenFormat(
        "jwt",
        ("eyJ",),
        r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}(?:\.[\w-]+){0,3}|eyJ[\w-]{15,}\.[\w-]*\.[\w-]{16}\.[\w-]+\.[\w-]{22}"
        r"|eyJrIjoi[A-Za-z0-9]{60,}=*",
    ),
    # registries: the issuers' own documentation; gitleaks npm-access-token, pypi-upload-token
    TokenFormat("npm_token", ("npm_",), r"npm_[A-Za-z0-9]{36}(?!\w)"),
    TokenFormat("pypi_token", ("pypi-AgEI",), r"pypi-AgEI[\w-]{50,}"),
    TokenFormat("docker_token", ("dckr_pat_", "dckr_oat_"), r"dckr_[po]at_[\w-]{20,}"),
    # gitleaks, the rules of these names
    TokenFormat("digitalocean_token", ("dop_v1_", "doo_v1_", "dor_v1_"), r"do[opr]_v1_[a-f0-9]{64}"),
    TokenFormat("databricks_token", ("dapi",), r"dapi[a-f0-9]{32}(?:-\d)?(?!\w)"),
    TokenFormat("sendgrid_key", ("SG.",), r"SG\.[\w-]{16,32}\.[\w-]{16,64}"),
    TokenFormat("vault_token", ("hvs.", "hvb.", "hvr."), r"hv[sbr]\.[\w-]{24,}"),
    TokenFormat("grafana_token", ("glsa_",), r"glsa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}"),
    TokenFormat("grafana_token", ("glc_",), r"glc_[A-Za-z0-9+/]{32,}=*"),
    TokenFormat("shopify_token", ("shpat_", "shpca_", "shppa_", "shpss_"), r"shp[acps][ats]_[a-fA-F0-9]{32}"),
    TokenFormat("atlassian_token", ("ATATT3",), r"ATATT3[\w=-]{100,}"),
    TokenFormat("linear_key", ("lin_api_",), r"lin_api_[A-Za-z0-9]{40}"),
    TokenFormat("sentry_token", ("sntrys_", "sntryu_"), r"sntry[su]_[A-Za-z0-9+/=_]{40,}"),
    TokenFormat("new_relic_key", ("NRAK-",), r"NRAK-[A-Z0-9]{27}"),
    TokenFormat("twilio_key", ("SK",), r"SK[0-9a-f]{32}(?!\w)"),
    TokenFormat("openshift_token", ("sha256~",), r"sha256~[\w-]{43}(?![\w-])"),
    TokenFormat("pulumi_token", ("pul-",), r"pul-[a-f0-9]{40}(?!\w)"),
    TokenFormat("age_key", ("AGE-SECRET-KEY-1",), r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    # supabase.com/docs, "API keys"; tailscale.com/kb, "Key prefixes"
    TokenFormat("supabase_key", ("sb_secret_", "sbp_"), r"(?:sb_secret_|sbp_)[\w-]{20,}"),
    TokenFormat("tailscale_key", ("tskey-",), r"tskey-[a-z]+-[\w-]{16,}"),
    # base64 of "-----BEGIN … PRIVATE KEY", as kubeconfig and Kubernetes hold it
    TokenFormat(
        "private_key",
        ("LS0tLS1CRUdJTi",),
        r"LS0tLS1CRUdJTi(?:BSU0EgUFJJVkFURSBLRVkt|BQUklWQVRFIEtFWS0t|BFQyBQUklWQVRFIEtFWS0t|BPUEVOU1NIIFBSSVZBVEUgS0VZ"
        r"|BFTkNSWVBURUQgUFJJVkFURSBLRVkt)[A-Za-z0-9+/=]*",
    ),
)


@dataclass(frozen=True, slots=True)
class Keyword:
    """A word that announces a value: ``password: hunter2``. ``before`` is searched in what stands directly before the
    word, ``unless`` too. ``rule`` says which values count, see ``shared.redaction.values``."""

    word: str
    kind: str
    rule: str
    before: str | None = None
    unless: str | None = None


# Tokens that page through a list or synchronise a client are no secrets, and tools need them back unchanged.
_PAGING: Final = r"(?i)(?:next|page|continu(?:e|ation)|sync|cursor|pagination|resume|forward|backward)[_-]?$"

KEYWORDS: Final = (
    Keyword("password", "password", "any"),
    Keyword("passwd", "password", "any"),
    Keyword("passphrase", "password", "any"),
    Keyword("pwd", "password", "any", unless=r"(?i)(?:old|\bcd )$"),
    Keyword("pass", "password", "any", before=r"[A-Za-z0-9][_-]$"),
    Keyword("secret", "secret", "random"),
    Keyword("token", "token", "random", unless=_PAGING),
    Keyword("credential", "secret", "random"),
    Keyword(
        "key",
        "api_key",
        "random",
        before=r"(?i)(?:api|access|secret|private|account|sign(?:ing)?|encrypt(?:ion)?|shared|auth|master|service"
        r"|license|webhook|deploy|app)[_-]?$",
    ),
    Keyword("key-data", "private_key", "random"),
    Keyword("sig", "signature", "random", before=r"[?&;]$"),
    Keyword("authorization", "authorization", "header"),
    Keyword('"auth', "password", "docker"),
)
BEARER: Final = "bearer"
