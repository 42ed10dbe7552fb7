{{- define "kvtier.selector" -}}
app.kubernetes.io/name: kvtier
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvtier.labels" -}}
app.kubernetes.io/name: kvtier
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvtier
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The chart's labels with those of one object, each key once: an object's own win over the common
ones. Parameters: root, labels. */}}
{{- define "kvtier.labelsWith" -}}
{{- toYaml (merge (dict) (default (dict) .labels) (fromYaml (include "kvtier.labels" .root))) }}
{{- end }}

{{/* The annotations of an object's metadata, indented, or nothing. Parameters: root, annotations;
argocd: those for Argo CD. */}}
{{- define "kvtier.annotations" -}}
{{- $argocd := ternary .argocd (dict) (and .root.Values.argocd.enabled (hasKey . "argocd")) }}
{{- with merge (dict) (default (dict) .annotations) $argocd (default (dict) .root.Values.commonAnnotations) }}
  annotations:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{/* The name of a ServiceAccount. Parameters: root, component. */}}
{{- define "kvtier.account" -}}
{{- default (printf "kvtier-%s" .component) (get .root.Values .component).serviceAccount.name }}
{{- end }}

{{/* Whose writes the ValidatingAdmissionPolicies limit. */}}
{{- define "kvtier.username" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "kvtier.account" (dict "root" . "component" "controller") }}
{{- end }}

{{/* An image reference with the registry and the tag that the values and the chart say. Parameters:
root, image. */}}
{{- define "kvtier.image" -}}
{{- $image := .image }}
{{- $parts := splitList "/" $image }}
{{- $first := first $parts }}
{{- if .root.Values.images.registry }}
{{- if and (gt (len $parts) 1) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) }}
{{- $image = join "/" (rest $parts) }}
{{- end }}
{{- $image = printf "%s/%s" (trimSuffix "/" .root.Values.images.registry) $image }}
{{- end }}
{{- if or (contains "@" $image) (contains ":" (last $parts)) }}
{{- $image }}
{{- else }}
{{- printf "%s:%s" $image .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* The operator's settings file (kvtier_operator.settings). */}}
{{- define "kvtier.settings" -}}
namespace: {{ .Release.Namespace }}
watchNamespaces: {{ toJson .Values.watchNamespaces }}
images:
  payload: {{ include "kvtier.image" (dict "root" . "image" .Values.images.payload) | quote }}
  tierd: {{ include "kvtier.image" (dict "root" . "image" .Values.images.tierd) | quote }}
  pullPolicy: {{ .Values.images.pullPolicy }}
  pullSecret: {{ .Values.images.injectedPullSecret | quote }}
storage:
  createVolumes: {{ .Values.storage.createVolumes }}
rollout:
  enabled: {{ .Values.rollout.enabled }}
allowedVolumes: {{ toJson .Values.allowedVolumes }}
policyBounds: {{ toJson .Values.policyBounds }}
webhook:
  port: {{ .Values.webhook.port | int64 }}
  drainSeconds: {{ .Values.webhook.drainSeconds }}
  namespaceSelector: {{ toJson .Values.webhook.namespaceSelector }}
  certificates:
    mode: {{ ternary "SelfManaged" "Mounted" (eq .Values.webhook.certificates.mode "SelfManaged") }}
    secretName: {{ .Values.webhook.certificates.secretName }}
    lifetimeSeconds: {{ .Values.webhook.certificates.lifetimeSeconds | int64 }}
    renewBeforeSeconds: {{ .Values.webhook.certificates.renewBeforeSeconds | int64 }}
controller:
  resyncSeconds: {{ .Values.controller.resyncSeconds }}
  pollSeconds: {{ .Values.controller.pollSeconds }}
  pollTimeoutSeconds: {{ .Values.controller.pollTimeoutSeconds }}
  pollConcurrency: {{ .Values.controller.pollConcurrency | int64 }}
  statusBytesSeconds: {{ .Values.controller.statusBytesSeconds }}
  maxReconcilesPerSecond: {{ .Values.controller.maxReconcilesPerSecond }}
  leaderElection:
    leaseSeconds: {{ .Values.controller.leaderElection.leaseSeconds | int64 }}
    renewDeadlineSeconds: {{ .Values.controller.leaderElection.renewDeadlineSeconds }}
    retrySeconds: {{ .Values.controller.leaderElection.retrySeconds }}
monitoring:
  port: {{ .Values.monitoring.port | int64 }}
clusterDomain: {{ .Values.clusterDomain }}
{{- end }}

{{/* The pod template of a Deployment. Parameters: root, component, values, hostNetwork, ports, mounts,
volumes, affinity. */}}
{{- define "kvtier.pod" -}}
metadata:
  labels:
    {{- include "kvtier.labelsWith" (dict "root" .root "labels" .values.podLabels) | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  annotations:
    {{- $checksum := dict "kvtier.io/settings-checksum" (include "kvtier.settings" .root | sha256sum) }}
    {{- $default := dict "kubectl.kubernetes.io/default-container" .component }}
    {{- toYaml (merge $checksum (default (dict) .values.podAnnotations) (default (dict) .root.Values.commonAnnotations) $default) | nindent 4 }}
spec:
  serviceAccountName: {{ include "kvtier.account" . }}
  {{- with .root.Values.images.pullSecrets }}
  imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
  {{- end }}
  {{- with .values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if .hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  terminationGracePeriodSeconds: {{ max 30 (add 25 (ceil (default 0 .values.drainSeconds))) }}
  {{- with .root.Values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
  - name: {{ .component }}
    image: {{ include "kvtier.image" (dict "root" .root "image" .root.Values.images.operator) | quote }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    args: [{{ .component }}, --settings, /etc/kvtier-operator/settings.yaml, --log-format, {{ .values.logFormat }}, --log-level, {{ .values.logLevel }}]
    env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    {{- with .values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    ports:
    - {name: monitoring, containerPort: {{ .root.Values.monitoring.port | int64 }}}
    {{- with .ports }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    livenessProbe:
      httpGet: {path: /healthz, port: monitoring}
      initialDelaySeconds: 10
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      httpGet: {path: /readyz, port: monitoring}
      periodSeconds: 2
      timeoutSeconds: 5
    {{- with .root.Values.containerSecurityContext }}
    securityContext:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    resources:
      {{- toYaml .values.resources | nindent 6 }}
    volumeMounts:
    # A subPath mount never changes in a running pod. The checksum annotation restarts the pod.
    - {name: settings, mountPath: /etc/kvtier-operator/settings.yaml, subPath: settings.yaml, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- with concat (default (list) .mounts) (default (list) .values.extraVolumeMounts) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
  - name: settings
    configMap: {name: kvtier-settings}
  - name: tmp
    emptyDir: {sizeLimit: 64Mi}
  {{- with concat (default (list) .volumes) (default (list) .values.extraVolumes) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.topologySpreadConstraints }}
  topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (merge (dict) . (dict "labelSelector" (dict "matchLabels" (fromYaml (include "kvtier.selector" $))))) | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end }}

{{/* A disruption budget, if there are several replicas. Parameters: root, component. */}}
{{- define "kvtier.disruptionBudget" -}}
{{- $values := get .root.Values .component }}
{{- if gt (int64 $values.replicas) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: kvtier-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "kvtier.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- include "kvtier.annotations" (dict "root" .root) }}
spec:
  {{- range $key, $value := $values.podDisruptionBudget }}
  {{- if ne (toString $value) "<nil>" }}
  {{ $key }}: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ int64 $value }}{{ end }}
  {{- end }}
  {{- end }}
  # A replica that is not ready protects nothing.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "kvtier.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* Milliseconds of a duration such as 1m30s. */}}
{{- define "kvtier.milliseconds" -}}
{{- $units := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 }}
{{- $sum := 0 }}
{{- range regexFindAll "[0-9]+(ms|s|m|h)" . -1 }}
{{- $number := regexFind "[0-9]+" . }}
{{- $sum = add $sum (mul (int64 $number) (get $units (trimPrefix $number .))) }}
{{- end }}
{{- $sum }}
{{- end }}

{{/* The settings of an endpoint of a PodMonitor or ServiceMonitor. */}}
{{- define "kvtier.scrape" -}}
{{- with .interval }}
interval: {{ . }}
{{- end }}
{{- with .scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with .relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
