//! The services of an engine beside its steps: listeners, file watches, traces, the recording.

use std::path::Path;
use std::sync::Arc;

use meridian_core::config::SlotMode;
use meridian_core::oci::OciReference;
use meridian_core::{MeridianConfig, SlotName};
use meridian_runtime::admin::Admin;
use meridian_runtime::control::{Control, Mode};
use meridian_runtime::recording::Recorder;
use meridian_runtime::traces::Traces;
use meridian_runtime::watch::{FileWatch, WatchedFile};

use crate::awaited::Fetches;

/// Owners of threads, ports and files. They drop in this order, so that no caller changes a policy through a listener
/// that is about to end.
#[derive(Default)]
#[expect(dead_code, reason = "held for what ends with them")]
pub(crate) struct Services {
    admin: Option<Admin>,
    watches: Vec<FileWatch>,
    fetches: Fetches,
    traces: Option<Arc<Traces>>,
    recorder: Option<Recorder>,
}

impl Services {
    /// Start the services of the configuration: a watch of each component's file and, with `serves`, the listeners and
    /// the traces. The recording continues until they have ended.
    pub(crate) fn start(
        config: &MeridianConfig,
        base_dir: &Path,
        model: &str,
        control: &Arc<dyn Control>,
        serves: bool,
        recorder: Option<Recorder>,
    ) -> Self {
        // Before any caller can change the loaded policies.
        let loaded = control.status().slots;
        let mut telemetry = config.telemetry.clone();
        if !telemetry.otlp_ca_file.is_empty() {
            telemetry.otlp_ca_file = base_dir.join(&telemetry.otlp_ca_file).display().to_string();
        }
        let trace = || Traces::start(&telemetry, model, Some(Arc::clone(control)));
        let traces = if serves { trace() } else { Ok(None) };
        let traces = traces.inspect_err(|why| tracing::warn!("{why}")).ok().flatten().map(Arc::new);
        let admin = serves.then(|| Admin::start(Arc::clone(control), &config.admin, &config.telemetry, base_dir));
        // The audit log has what the watch changes.
        let watching = match &admin {
            Some(admin) => admin.audited(Arc::clone(control), "file watch"),
            None => Arc::clone(control),
        };
        let policy = &config.policy;
        let mut watches = Vec::new();
        for (name, slot) in SlotName::ALL.into_iter().zip([&policy.dispatch, &policy.eviction, &policy.budget]) {
            if !policy.watch || slot.source.starts_with("native:") || OciReference::is_one(&slot.source) {
                continue;
            }
            let loaded = loaded.iter().find(|slot| slot.slot == name);
            let (mode, version) = match slot.mode {
                SlotMode::Active => (Mode::Active, loaded.map(|slot| &slot.active)),
                SlotMode::Shadow => (Mode::Shadow, loaded.and_then(|slot| Some(&slot.shadow.as_ref()?.version))),
            };
            let sha256 = version.map_or("", |version| &version.sha256);
            let path = base_dir.join(&slot.source);
            let file = WatchedFile::new(&path, name, Arc::clone(&watching), sha256).with_mode(mode);
            match FileWatch::start(file) {
                Ok(watch) => watches.push(watch),
                Err(why) => tracing::warn!(slot = name.label(), why, "the policy's file is not watched"),
            }
        }
        Self { admin, watches, fetches: Fetches::default(), traces, recorder }
    }

    /// The same with these fetches.
    pub(crate) fn with_fetches(mut self, fetches: Fetches) -> Self {
        self.fetches = fetches;
        self
    }

    /// The private socket of the admin listener, `unix:PATH`.
    pub(crate) fn socket(&self) -> Option<&str> {
        self.admin.as_ref().and_then(Admin::socket)
    }

    /// The engine for code of this process, whose changes the audit log has too.
    pub(crate) fn audited(&self, control: Arc<dyn Control>) -> Arc<dyn Control> {
        match &self.admin {
            Some(admin) => admin.audited(control, "in process"),
            None => control,
        }
    }

    /// The traces that receive ended requests.
    pub(crate) fn traces(&self) -> Option<Arc<Traces>> {
        self.traces.clone()
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        self.admin.take();
        self.watches.clear();
        self.fetches = Fetches::default();
        // The engine holds a reference too.
        if let Some(traces) = &self.traces {
            traces.close();
        }
    }
}
