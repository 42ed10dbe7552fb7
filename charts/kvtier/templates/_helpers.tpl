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
{{- end }}

{{/* The operator's settings file (kvtier_operator.settings). */}}
{{- define "kvtier.settings" -}}
namespace: {{ .Release.Namespace }}
watchNamespaces: {{ toJson .Values.watchNamespaces }}
images:
  payload: {{ .Values.images.payload | quote }}
  tierd: {{ .Values.images.tierd | quote }}
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
  certificates:
    mode: {{ .Values.webhook.certificates.mode }}
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
    {{- include "kvtier.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with .values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .component }}
    kvtier.io/settings-checksum: {{ include "kvtier.settings" .root | sha256sum }}
    {{- with .values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: kvtier-{{ .component }}
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
  terminationGracePeriodSeconds: 30
  securityContext:
    # No user or group: the image names one, and OpenShift assigns those of the namespace.
    runAsNonRoot: true
    seccompProfile: {type: RuntimeDefault}
  containers:
  - name: {{ .component }}
    image: {{ .root.Values.images.operator | quote }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    args: [{{ .component }}, --settings, /etc/kvtier-operator/settings.yaml, --log-format, {{ .values.logFormat }}]
    env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
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
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    resources:
      {{- toYaml .values.resources | nindent 6 }}
    volumeMounts:
    # A subPath mount never changes in a running pod. The checksum annotation restarts the pod.
    - {name: settings, mountPath: /etc/kvtier-operator/settings.yaml, subPath: settings.yaml, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- with .mounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
  - name: settings
    configMap: {name: kvtier-settings}
  - name: tmp
    emptyDir: {sizeLimit: 64Mi}
  {{- with .volumes }}
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
{{- end }}
