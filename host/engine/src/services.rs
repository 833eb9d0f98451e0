//! The services of an engine beside its steps: listeners, file watches, traces, the recording.

use std::path::Path;
use std::sync::Arc;

use meridian_core::config::SlotMode;
use meridian_core::{MeridianConfig, PolicySource, SlotName};

use crate::awaited::Fetches;
use crate::config_watch::ConfigWatch;
use crate::control::{Control, Mode};
use crate::otlp::Traces;
use crate::recording::Recorder;
use crate::watch::{FileWatch, Pace, WatchedFile};

/// The listeners beside an engine, which change its policies and read its status: `meridian_admin::Admin`. The engine
/// drops them first when it shuts down; that may take some seconds, and no change begins after it.
pub trait Listeners: Send {
    /// The private socket, `unix:PATH`.
    fn socket(&self) -> Option<&str>;

    /// The engine for a part of this process that changes its policies: the audit log names it `who`.
    fn audited(&self, control: Arc<dyn Control>, who: &str) -> Arc<dyn Control>;
}

/// Starts the listeners of a configuration, whose relative paths start from the folder. The thread that starts the engine
/// calls it once; it returns at once and never fails.
pub type StartListeners = fn(Arc<dyn Control>, &MeridianConfig, &Path) -> Box<dyn Listeners>;

/// Owners of threads, ports and files. They drop in this order, so that no caller changes a policy through a listener
/// that is about to end.
#[derive(Default)]
#[expect(dead_code, reason = "held for what ends with them")]
pub(crate) struct Services {
    listeners: Option<Box<dyn Listeners>>,
    watches: Vec<FileWatch>,
    fetches: Fetches,
    traces: Option<Arc<Traces>>,
    recorder: Option<Recorder>,
}

impl Services {
    /// Start the services of the configuration: a watch of each component's file and, with `serve`, the listeners and
    /// the traces. The recording continues until they have ended.
    pub(crate) fn start(
        config: &MeridianConfig,
        base_dir: &Path,
        model: &str,
        control: &Arc<dyn Control>,
        serve: Option<StartListeners>,
        recorder: Option<Recorder>,
    ) -> Self {
        // Before any caller can change the loaded policies.
        let loaded = control.status().slots;
        let mut telemetry = config.telemetry.clone();
        if !telemetry.otlp_ca_file.is_empty() {
            telemetry.otlp_ca_file = base_dir.join(&telemetry.otlp_ca_file).display().to_string();
        }
        let trace = || Traces::start(&telemetry, model, Some(Arc::clone(control)));
        let traces = if serve.is_some() { trace() } else { Ok(None) };
        let traces = traces.inspect_err(|why| tracing::warn!("{why}")).ok().flatten().map(Arc::new);
        let listeners = serve.map(|serve| serve(Arc::clone(control), config, base_dir));
        // The audit log has what the watch changes.
        let watching = match &listeners {
            Some(listeners) => listeners.audited(Arc::clone(control), "file watch"),
            None => Arc::clone(control),
        };
        let policy = &config.policy;
        let mut watches = Vec::new();
        for (name, slot) in SlotName::ALL.into_iter().zip([&policy.dispatch, &policy.eviction, &policy.budget]) {
            if !policy.watch || !PolicySource::of(&slot.source).is_file() {
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
        Self { listeners, watches, fetches: Fetches::default(), traces, recorder }
    }

    /// The same with these fetches.
    pub(crate) fn with_fetches(mut self, fetches: Fetches) -> Self {
        self.fetches = fetches;
        self
    }

    /// The same with a watch of the configuration's file.
    pub(crate) fn with_config_watch(mut self, file: ConfigWatch) -> Self {
        match FileWatch::over(file, Pace::default()) {
            Ok(watch) => self.watches.push(watch),
            Err(why) => tracing::warn!(why, "the configuration file is not watched"),
        }
        self
    }

    /// The private socket of the admin listener, `unix:PATH`.
    pub(crate) fn socket(&self) -> Option<&str> {
        self.listeners.as_ref().and_then(|listeners| listeners.socket())
    }

    /// The engine for code of this process, whose changes the audit log has too.
    pub(crate) fn audited(&self, control: Arc<dyn Control>) -> Arc<dyn Control> {
        match &self.listeners {
            Some(listeners) => listeners.audited(control, "in process"),
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
        self.listeners.take();
        self.watches.clear();
        self.fetches = Fetches::default();
        // The engine holds a reference too.
        if let Some(traces) = &self.traces {
            traces.close();
        }
    }
}
