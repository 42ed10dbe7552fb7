"""The dashboard about policies, controller and webhook."""

from __future__ import annotations

from tools.monitoring.panels import POLICY, RATE, Board, Panel, Query


def _by_policy(state: str) -> str:
    return f"max by (policy_namespace, policy) (kvtier_operator_policy_{state}_pods{{{POLICY}}})"


OPERATOR = Board(
    "operator",
    "KVTier / Operator",
    "Policies, their pods, and the work of controller and webhook.",
    ("namespace", "policy"),
    {
        "Policies": (
            Panel(
                "Policies that are not Ready",
                "Policies whose condition Ready is not True.",
                "short",
                (
                    Query(
                        "count(max by (policy_namespace, policy) (kvtier_operator_policy_condition"
                        f'{{{POLICY},condition="Ready"}}) < 1) or vector(0)'
                    ),
                ),
                "KVTierPolicyNotReady",
                single=True,
                bad=1,
            ),
            Panel(
                "Conditions that are not True",
                "0 for False, -1 for Unknown.",
                "short",
                (
                    Query(
                        "max by (policy_namespace, policy, condition) "
                        f"(kvtier_operator_policy_condition{{{POLICY}}}) < 1",
                        "{{policy_namespace}}/{{policy}} {{condition}}",
                    ),
                ),
                "KVTierPolicyNotReady",
                fault="condition of a policy",
            ),
            Panel(
                "Pods without tiers",
                "Selected pods that are not attached.",
                "short",
                (
                    Query(
                        f"{_by_policy('selected')} - {_by_policy('attached')}",
                        "{{policy_namespace}}/{{policy}}",
                    ),
                ),
                "KVTierPodsNotAttached",
            ),
            Panel(
                "Pods with an earlier structure",
                "Attached pods that were not restarted since a structural change.",
                "short",
                (Query(_by_policy("outdated"), "{{policy_namespace}}/{{policy}}"),),
                "KVTierConfigurationOutdated",
            ),
        ),
        "Controller": (
            Panel(
                "Leader",
                "1 for the replica that leads.",
                "short",
                (Query("max by (pod) (kvtier_operator_leader)", "{{pod}}"),),
                "KVTierOperatorDown",
            ),
            Panel(
                "Duration of reconciles",
                "From reading the cache to writing the status.",
                "s",
                (
                    Query(
                        "histogram_quantile(0.99, sum by (le) (rate("
                        f"kvtier_operator_reconcile_duration_seconds_bucket{RATE})))",
                        "p99",
                    ),
                    Query("sum(kvtier_operator_queue_depth)", "policies that wait"),
                ),
            ),
            Panel(
                "Failed reconciles",
                "By reason. `Fault` is a bug; others are retried and usually succeed.",
                "cps",
                (
                    Query(
                        f"sum by (reason) (rate(kvtier_operator_reconcile_errors_total{RATE}))",
                        "{{reason}}",
                    ),
                ),
                "KVTierReconcileFaults",
                stacked=True,
            ),
            Panel(
                "Calls to the API server",
                "Attempts by verb and status code.",
                "cps",
                (
                    Query(
                        f"sum by (verb, code) (rate(kvtier_operator_api_calls_total{RATE})) > 0",
                        "{{verb}} {{code}}",
                    ),
                ),
                stacked=True,
            ),
        ),
        "Webhook": (
            Panel(
                "Ready replicas",
                "Webhook replicas that answer admission requests.",
                "short",
                (Query("sum(kvtier_webhook_ready)", "ready"),),
                "KVTierWebhookDown",
            ),
            Panel(
                "Answers",
                "Admission responses by result.",
                "cps",
                (
                    Query(
                        f"sum by (path, result) (rate(kvtier_webhook_answers_total{RATE}))",
                        "{{path}} {{result}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Time to answer",
                "The API server waits for this time when a pod is created.",
                "s",
                (
                    Query(
                        "histogram_quantile(0.99, sum by (le, path) (rate("
                        f"kvtier_webhook_request_duration_seconds_bucket{RATE})))",
                        "{{path}} p99",
                    ),
                ),
                needs="pods or policies that are created meanwhile",
            ),
            Panel(
                "Certificate expires in",
                "Time until the webhook's serving certificate expires.",
                "s",
                (
                    Query(
                        "min(kvtier_webhook_certificate_expiry_timestamp_seconds > 0) - time()",
                        "expires",
                    ),
                ),
                "KVTierCertificateExpires",
            ),
            Panel(
                "Skipped pods",
                "Pods that a policy selects and that were admitted without tiers, by reason.",
                "cps",
                (
                    Query(
                        f"sum by (reason) (rate(kvtier_webhook_skipped_pods_total{RATE}))",
                        "{{reason}}",
                    ),
                ),
                "KVTierPodsNotAttached",
                stacked=True,
            ),
        ),
    },
)
