use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use meridian_core::{Markers, MeridianConfig, SlotName};
use meridian_registry::Limits;
use meridian_wasm::TrustedKeys;

use crate::awaited::{FetchPace, Fetches, Problems};
use crate::config_watch::{ConfigNote, ConfigWatch};
use crate::control::{Control, ControlError, Mode, ProcessStatus, SwapReport, Upload};
use crate::insight::DriverInsight;
use crate::live::{DriverBudgets, LiveChanges};
use crate::services::{Services, StartListeners};
use crate::slots::Slots;
use crate::{Components, Controller, Driver, EngineError};

/// The folder of fetched and compiled components when the configuration names none: `meridian/components` in the user's
/// cache folder. Reads the environment.
#[must_use]
pub fn user_cache_dir() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).map(PathBuf::from);
    let base = var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")))?;
    Some(base.join("meridian").join("components"))
}

/// Settings for the start of an engine, beside its configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Folder that relative paths of the configuration start from.
    pub base_dir: PathBuf,
    /// The file that the configuration was read from, watched for changes; `None` to watch none.
    pub config_file: Option<PathBuf>,
    /// Folder of fetched and compiled components when `policy.cache_dir` is empty, kept between processes; `None` fetches
    /// and compiles every time.
    pub cache_dir: Option<PathBuf>,
    /// Markers that start and end thinking in the model's output; `model.resumes` says whether thinking may resume.
    pub markers: Markers,
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// Tokens of a state block, if the engine computes prompts in whole ones: models with Mamba or GDN layers.
    pub state_block: Option<u32>,
    /// Steps that are scheduled before the result of one is known: 0 for synchronous scheduling.
    pub steps_ahead: usize,
    /// The model's name, for status and traces.
    pub model: String,
    /// Its place among data-parallel engines, for status and discovery; `None` where that is not known.
    pub dp: Option<DataParallel>,
    /// Starts the admin listener and the metrics that the configuration enables: `meridian_admin::serve`. `None` for
    /// neither, and for no traces.
    pub serve: Option<StartListeners>,
    /// The engine itself schedules by priority.
    pub priority_first: bool,
    /// Limits of a fetch of a component from a registry.
    pub registry: Limits,
    /// Pauses between two fetches of a configured component that failed.
    pub fetch_pace: FetchPace,
    /// The caller moves the engine's KV blocks, with `meridian-memory`, so `disagg.enabled` may be true.
    pub moves_kv: bool,
    /// Time passes only as the caller says: decisions take none in a timeline.
    pub simulates_time: bool,
}

/// The place of an engine among the data-parallel engines of a deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataParallel {
    /// Its rank, from 0.
    pub rank: u32,
    /// The number of ranks, if known.
    pub size: Option<u32>,
}

impl Default for Settings {
    /// A model without thinking, blocks of 16 tokens, synchronous scheduling, no listeners.
    fn default() -> Self {
        Self {
            base_dir: PathBuf::from("."),
            config_file: None,
            cache_dir: None,
            markers: Markers::default(),
            block_tokens: 16,
            state_block: None,
            steps_ahead: 0,
            model: String::new(),
            dp: None,
            serve: None,
            priority_first: false,
            registry: Limits::default(),
            fetch_pace: FetchPace::default(),
            moves_kv: false,
            simulates_time: false,
        }
    }
}

/// One engine. The scheduling thread calls [`Engine::drive`] for each step; any thread may change its policies
/// meanwhile.
pub struct Engine {
    driver: Arc<Mutex<Driver>>,
    controller: Arc<Controller>,
    /// The same for code of this process.
    control: Arc<dyn Control>,
    /// Owners of threads, ports and files; [`Engine::shutdown`] ends them.
    services: Mutex<Services>,
}

impl Engine {
    /// Load the policies of the configuration and start its services. Compiling a component takes tens of milliseconds. A
    /// component in a registry that is not in the cache is fetched on another thread; the native default decides meanwhile.
    ///
    /// # Errors
    /// The field of the configuration that cannot be used, and the reason.
    pub fn start(config: MeridianConfig, mut settings: Settings) -> Result<Self, EngineError> {
        config.validate()?;
        if config.disagg.enabled && !settings.moves_kv {
            // A setting without effect would be taken for one that works.
            return Err(EngineError::Config(meridian_core::Error::ConfigValidation {
                field: "disagg.enabled".into(),
                value: "true".into(),
                reason: "this engine manages its KV memory itself, expected false".into(),
            }));
        }
        let base_dir = settings.base_dir.clone();
        let keys = TrustedKeys::parse("policy.trusted_keys", &config.policy.trusted_keys, &base_dir)?;
        let configured = Some(&config.policy.cache_dir).filter(|dir| !dir.is_empty()).map(|dir| base_dir.join(dir));
        let components = Components::new(configured.or_else(|| settings.cache_dir.clone()), keys)
            .with_registry_limits(settings.registry);
        settings.markers = settings.markers.with_resuming(config.model.resumes);
        // Filled when the driver exists: the slots come first.
        let driver = Arc::new(OnceLock::new());
        let problems = Problems::default();
        let note = ConfigNote::default();
        let about = (Arc::clone(&problems), Arc::clone(&note));
        let status = process_status(Arc::clone(&driver), settings.model.clone(), settings.dp, about);
        let Slots { dispatch, eviction, budget, controller, recorder, awaited } =
            Slots::new(&config, &base_dir, components, Box::new(status))?;
        let controller = controller.with_insight(Box::new(DriverInsight::new(Arc::clone(&driver))));
        let changes = Arc::<LiveChanges>::default();
        let budgets = DriverBudgets { driver: Arc::clone(&driver), changes: Arc::clone(&changes) };
        let controller = controller.with_budgets(Box::new(budgets));
        let (model, serve, pace) = (settings.model.clone(), settings.serve, settings.fetch_pace);
        let config_file = settings.config_file.clone();
        let started = Arc::new(Mutex::new(Driver::new(config.clone(), settings, dispatch, eviction, budget)));
        lock(&started).changes = changes;
        // No other code has set it.
        let _ = driver.set(Arc::downgrade(&started));
        let controller = Arc::new(controller);
        let control = Arc::clone(&controller) as Arc<dyn Control>;
        let services = Services::start(&config, &base_dir, &model, &control, serve, recorder);
        let services = services.with_fetches(Fetches::start(awaited, &control, pace, problems));
        let services = match config_file {
            Some(path) => services.with_config_watch(ConfigWatch::new(&path, note, adopter(&started))),
            None => services,
        };
        let telemetry = &config.telemetry;
        let tenants = usize::try_from(telemetry.tenants).unwrap_or(usize::MAX);
        let asks = !telemetry.prometheus.is_empty() || !config.admin.listen.is_empty();
        if serve.is_some() && asks {
            lock(&started).observe(tenants);
        }
        lock(&started).traces = services.traces();
        let control = services.audited(control);
        Ok(Self { driver: started, controller, control, services: Mutex::new(services) })
    }

    /// The engine, for the scheduling thread. A status request from another thread waits meanwhile, so hold the guard
    /// for at most a step. A thread that holds it must not request a status, drive again or shut down.
    pub fn drive(&self) -> MutexGuard<'_, Driver> {
        lock(&self.driver)
    }

    /// Load a policy and put it to `mode`. May compile a component; holds the slot for microseconds at the end.
    ///
    /// # Errors
    /// The reason for a refusal.
    pub fn swap(&self, slot: SlotName, upload: &Upload<'_>, mode: Mode) -> Result<SwapReport, ControlError> {
        self.control.put(slot, upload, mode)
    }

    /// All other controls of its policies, and their status.
    #[must_use]
    pub fn control(&self) -> &dyn Control {
        &*self.control
    }

    /// The private socket of its admin listener, `unix:PATH`; `None` without one, and after [`Engine::shutdown`].
    #[must_use]
    pub fn socket(&self) -> Option<String> {
        lock(&self.services).socket().map(str::to_owned)
    }

    /// Stop the services that have threads, ports or files, within some seconds. The engine keeps its policies, which
    /// can no longer be changed.
    pub fn shutdown(&self) {
        let services = std::mem::take(&mut *lock(&self.services));
        // First, so that no waiting caller starts a compilation.
        self.controller.close();
        // Waits for threads, some seconds at most; a compiling thread ends by itself.
        drop(services);
    }
}

/// A panic under the lock leaves at worst half-updated counters; the engine continues.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands changed settings to the driver, while it exists.
fn adopter(driver: &Arc<Mutex<Driver>>) -> impl Fn(&MeridianConfig) + Send + 'static {
    let driver = Arc::downgrade(driver);
    move |config| {
        if let Some(driver) = driver.upgrade() {
            lock(&driver).adopt(config);
        }
    }
}

/// Facts about the engine, once it exists, for other threads.
fn process_status(
    driver: Arc<OnceLock<Weak<Mutex<Driver>>>>,
    model: String,
    dp: Option<DataParallel>,
    (problems, note): (Problems, ConfigNote),
) -> impl Fn() -> ProcessStatus + Send + Sync {
    let started = Instant::now();
    move || {
        let mut status = ProcessStatus {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            model: model.clone(),
            dp_rank: dp.map(|dp| dp.rank),
            dp_size: dp.and_then(|dp| dp.size),
            uptime_s: started.elapsed().as_secs_f64(),
            problems: lock(&problems).iter().chain([&*lock(&note)]).flatten().cloned().collect(),
            ..ProcessStatus::default()
        };
        if let Some(driver) = driver.get().and_then(Weak::upgrade) {
            lock(&driver).describe(&mut status);
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_settings_reach_the_driver_and_a_broken_file_the_status() {
        let file = std::env::temp_dir().join(format!("meridian-engine-{}.toml", std::process::id()));
        std::fs::write(&file, "[scheduler]\nmax_defer_ms = 0").expect("a folder to write to");
        let settings = Settings { config_file: Some(file.clone()), ..Settings::default() };
        let engine = Engine::start(MeridianConfig::default(), settings).expect("the configuration is valid");
        let problems = engine.control().status().problems;
        // Not before: the watch's thread may look at any time.
        std::fs::remove_file(&file).expect("it was written");
        let expected = "scheduler.max_defer_ms: 0: must be above 0; the settings before this stay";
        assert!(problems.len() == 1 && problems[0].ends_with(expected), "{problems:?}");

        let text = "[scheduler]\nmax_defer_ms = 77\n[policy]\nmax_strikes = 5";
        adopter(&engine.driver)(&MeridianConfig::from_toml(text).expect("it is valid"));
        let mut driver = engine.drive();
        assert!(format!("{:?}", driver.scheduler()).contains("max_defer_ms: 77.0"));
        assert_eq!(driver.config.policy.max_strikes, 5);
    }
}
