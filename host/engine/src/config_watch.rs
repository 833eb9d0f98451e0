//! `meridian.toml` while the engine runs: some settings change at once, the others are named, and a broken file changes
//! nothing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use meridian_core::MeridianConfig;
use meridian_core::config::EffectiveField;

use crate::config_file;
use crate::watch::{Stamp, Watched};

/// The settings that change while the engine runs, as [`Driver::adopt`](crate::Driver::adopt) takes them over.
const LIVE: [&str; 4] =
    ["scheduler.max_defer_ms", "scheduler.session_wait_ms", "policy.max_strikes", "policy.strike_window_s"];
/// Most settings in one line.
const MOST_NAMED: usize = 12;

/// The line about the file for the status; `None` while the engine runs by the file.
pub(crate) type ConfigNote = Arc<Mutex<Option<String>>>;

/// The file of the configuration, and the settings of it that are in effect.
pub(crate) struct ConfigWatch {
    path: PathBuf,
    /// `None` until the file could be read.
    fields: Option<Vec<EffectiveField>>,
    seen: Option<Stamp>,
    note: ConfigNote,
    adopt: Box<dyn Fn(&MeridianConfig) + Send>,
}

impl ConfigWatch {
    /// Watch the file that an engine has just been started with. `adopt` takes the live settings over.
    pub(crate) fn new(path: &Path, note: ConfigNote, adopt: impl Fn(&MeridianConfig) + Send + 'static) -> Self {
        // Seen from any working folder, and still through its links.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let mut made = Self { path, fields: None, seen: None, note, adopt: Box::new(adopt) };
        made.look();
        made
    }

    /// Note the line, and log it once.
    fn tell(&self, line: Option<String>) {
        let mut note = self.note.lock().unwrap_or_else(PoisonError::into_inner);
        if *note == line {
            return;
        }
        match &line {
            Some(line) => tracing::warn!("{line}"),
            None => tracing::info!(file = %self.path.display(), "the engine runs by its configuration file again"),
        }
        *note = line;
    }

    fn changed(&mut self, config: &MeridianConfig, fields: Vec<EffectiveField>) {
        let Some(before) = &mut self.fields else {
            self.fields = Some(fields);
            return self.tell(None);
        };
        let (live, rest): (Vec<_>, Vec<_>) =
            differing(before, &fields).into_iter().partition(|path| LIVE.contains(&path.as_str()));
        if !live.is_empty() {
            (self.adopt)(config);
            before.retain(|field| !LIVE.contains(&field.path.as_str()));
            before.extend(fields.into_iter().filter(|field| LIVE.contains(&field.path.as_str())));
            let settings = live.join(", ");
            tracing::info!(file = %self.path.display(), settings, "changed settings of the configuration file are in effect");
        }
        let file = self.path.display();
        self.tell((!rest.is_empty()).then(|| {
            let more = rest.len().saturating_sub(MOST_NAMED);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            let named = rest[..rest.len().min(MOST_NAMED)].join(", ");
            format!("{file}: changed in the file, needs a restart: {named}{more}")
        }));
    }
}

/// The settings that differ, in order.
fn differing(before: &[EffectiveField], after: &[EffectiveField]) -> BTreeSet<String> {
    let lacks = |fields: &[EffectiveField], wanted: &EffectiveField| {
        !fields.iter().any(|field| field.path == wanted.path && field.value == wanted.value)
    };
    let new = after.iter().filter(|field| lacks(before, field));
    let gone = before.iter().filter(|field| lacks(after, field));
    new.chain(gone).map(|field| field.path.clone()).collect()
}

impl Watched for ConfigWatch {
    fn path(&self) -> &Path {
        &self.path
    }

    fn needs_look(&self) -> bool {
        self.seen.is_none_or(|stamp| !stamp.is_of(&self.path))
    }

    fn look(&mut self) {
        if !self.needs_look() {
            return;
        }
        // Taken before reading, so that a write during the read gives another stamp.
        self.seen = Stamp::settled(&self.path);
        match config_file::read(&self.path) {
            Ok(parsed) => self.changed(&parsed.config, parsed.fields),
            Err(error) => self.tell(Some(format!("{error}; the settings before this stay"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("meridian-config-watch-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    /// A file, its watch, and what was taken over.
    struct Served {
        folder: PathBuf,
        watch: ConfigWatch,
        note: ConfigNote,
        adopted: Arc<Mutex<Vec<f32>>>,
    }

    impl Served {
        fn start(folder: PathBuf) -> Self {
            let (note, adopted) = (ConfigNote::default(), Arc::<Mutex<Vec<f32>>>::default());
            let kept = Arc::clone(&adopted);
            let adopt = move |config: &MeridianConfig| kept.lock().unwrap().push(config.scheduler.max_defer_ms);
            let watch = ConfigWatch::new(&folder.join("meridian.toml"), Arc::clone(&note), adopt);
            Self { folder, watch, note, adopted }
        }

        /// What is told and taken over behind a look at this text.
        fn look_at(&mut self, text: &str) -> (Option<String>, Vec<f32>) {
            std::fs::write(self.folder.join("meridian.toml"), text).unwrap();
            self.look()
        }

        fn look(&mut self) -> (Option<String>, Vec<f32>) {
            self.watch.look();
            let told = self.note.lock().unwrap().clone();
            let of_it = |line: String| line.replace(&format!("{}/", self.folder.display()), "");
            (told.map(of_it), std::mem::take(&mut self.adopted.lock().unwrap()))
        }
    }

    impl Drop for Served {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    #[test]
    fn live_settings_change_and_the_others_are_named() {
        let folder = folder("live");
        std::fs::write(folder.join("meridian.toml"), "[scheduler]\nmax_defer_ms = 500\n").unwrap();
        let mut served = Served::start(folder);
        assert_eq!(served.look(), (None, vec![]));
        assert_eq!(served.look_at("[scheduler]\nmax_defer_ms = 77\n"), (None, vec![77.0]));
        assert_eq!(served.look_at("# the same\n[scheduler]\nmax_defer_ms = 77\n"), (None, vec![]));
        let more = "[admin]\nlisten = ''\n[scheduler]\nmax_defer_ms = 78\nmax_think_tokens = 9000\n";
        let told = "meridian.toml: changed in the file, needs a restart: admin.listen, scheduler.max_think_tokens";
        assert_eq!(served.look_at(more), (Some(told.into()), vec![78.0]));
        // Back to the settings of the start: nothing is left to say.
        assert_eq!(served.look_at("[scheduler]\nmax_defer_ms = 500\n"), (None, vec![500.0]));
    }

    #[test]
    fn a_table_that_the_file_names_is_a_setting() {
        let folder = folder("levels");
        let levels = |ms| format!("[service_levels.chat]\nttfo_ms = {ms}\n");
        std::fs::write(folder.join("meridian.toml"), levels(500)).unwrap();
        let mut served = Served::start(folder);
        let told = "meridian.toml: changed in the file, needs a restart: service_levels.chat.ttfo_ms";
        assert_eq!(served.look_at(&levels(400)).0, Some(told.into()));
        let gone = served.look_at("").0.unwrap();
        assert!(gone.contains("service_levels.chat.ttfo_ms") && gone.ends_with(" more"), "{gone}");
    }

    #[test]
    fn a_broken_file_changes_nothing() {
        let folder = folder("broken");
        std::fs::write(folder.join("meridian.toml"), "").unwrap();
        let mut served = Served::start(folder);
        let (told, adopted) = served.look_at("[scheduler]\nmax_defer_ms = 0\npreempt");
        let told = told.unwrap();
        assert!(told.starts_with("meridian.toml: line 3, column ") && !told.contains('\n'), "{told}");
        assert!(told.ends_with("; the settings before this stay") && adopted.is_empty(), "{told}");
        std::fs::remove_file(served.folder.join("meridian.toml")).unwrap();
        assert!(served.look().0.unwrap().contains("cannot be read"));
        assert_eq!(served.look_at("[scheduler]\nmax_defer_ms = 5\n"), (None, vec![5.0]));
    }

    #[test]
    fn a_mounted_config_map_is_followed_through_its_links() {
        let folder = folder("mounted");
        let publish = |version: &str, ms: u32| {
            let data = folder.join(version);
            std::fs::create_dir(&data).unwrap();
            std::fs::write(data.join("meridian.toml"), format!("[scheduler]\nmax_defer_ms = {ms}\n")).unwrap();
            symlink(version, folder.join("..data_tmp")).unwrap();
            std::fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
        };
        publish("..1", 500);
        symlink("..data/meridian.toml", folder.join("meridian.toml")).unwrap();
        let mut served = Served::start(folder.clone());
        publish("..2", 77);
        std::fs::remove_dir_all(folder.join("..1")).unwrap();
        assert_eq!(served.look(), (None, vec![77.0]));
    }
}
