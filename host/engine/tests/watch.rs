//! The file watch: what becomes active, what is refused, and what is only said. Nothing here takes the active policy away.

#![allow(dead_code, reason = "the support is shared")]

use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use meridian_engine::control::{MAX_COMPONENT_BYTES, Mode, SlotName};
use meridian_engine::watch::{FileWatch, Looked, Pace, WatchedFile};
use sha2::{Digest, Sha256};

use support::{Recorder, folder};

use crate::support;

/// What a hang is told by; nothing waits as long.
const HANG: Duration = Duration::from_secs(60);

/// A watch of `path` for a slot that runs `content`.
fn watched(path: &Path, recorder: Arc<Recorder>, content: &str) -> WatchedFile {
    let sha256: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    WatchedFile::new(path, SlotName::Dispatch, recorder, &sha256)
}

/// A file that holds `first`, which the slot runs, and its watch.
struct Watched {
    path: PathBuf,
    recorder: Arc<Recorder>,
    file: WatchedFile,
}

impl Watched {
    fn new(name: &str) -> Self {
        let path = folder(name).join("policy.wasm");
        fs::write(&path, "first").unwrap();
        Self::at(&path)
    }

    fn at(path: &Path) -> Self {
        let recorder = Arc::new(Recorder::default());
        let file = watched(path, recorder.clone(), "first");
        Self { path: path.to_owned(), recorder, file }
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap()
    }

    fn write(&self, content: &str) {
        fs::write(&self.path, content).unwrap();
    }

    /// The content of `bytes` bytes becomes active, once.
    fn assert_swaps(&mut self, bytes: usize) {
        let looked = self.file.look();
        assert!(matches!(looked, Looked::Swapped(_)), "{looked:?}");
        self.assert_put(bytes);
        self.assert_unchanged();
    }

    /// It is refused, once, and not tried again.
    fn assert_refused(&mut self, why: &str) {
        assert_eq!(self.file.look(), Looked::Refused(why.into()));
        assert!(self.recorder.calls().is_empty());
        self.assert_unchanged();
    }

    /// It cannot be read: said once, in one line.
    fn assert_unreadable(&mut self, expected: &str) {
        let looked = self.file.look();
        let Looked::Unreadable(why) = &looked else { panic!("{looked:?}") };
        assert!(why.starts_with(expected) && !why.contains('\n'), "{why}");
        self.assert_unchanged();
    }

    fn assert_unchanged(&mut self) {
        assert_eq!(self.file.look(), Looked::Unchanged);
        assert!(self.recorder.calls().is_empty());
    }

    fn assert_put(&self, bytes: usize) {
        let put = format!("put {bytes} bytes Active {} dispatch", self.path.display());
        assert_eq!(self.recorder.calls(), [put]);
    }
}

#[test]
fn a_file_rewritten_in_place_becomes_active() {
    let mut watched = Watched::new("rewritten");
    watched.assert_unchanged();
    watched.write("second one");
    watched.assert_swaps(10);
    // Of the same length, and no later than the clock of the file system can tell.
    for turn in 0..100 {
        watched.write(if turn % 2 == 0 { "other one." } else { "second one" });
        watched.assert_swaps(10);
    }
}

/// What was loaded when the engine started, and what the file holds since.
#[test]
fn the_first_look_compares_with_what_runs() {
    let mut watched = Watched::new("first-look");
    watched.assert_unchanged();
    let path = folder("changed-since").join("policy.wasm");
    fs::write(&path, "other").unwrap();
    Watched::at(&path).assert_swaps(5);
}

#[test]
fn a_file_replaced_by_renaming_becomes_active() {
    let mut watched = Watched::new("renamed");
    // As vim writes with a backup: the old file moves away, a new one is made.
    fs::rename(&watched.path, watched.folder().join("policy.wasm~")).unwrap();
    watched.write("by an editor");
    watched.assert_swaps(12);
    // As a build or `mv` does, with the length and the time of the file before.
    let aside = watched.folder().join("aside");
    fs::write(&aside, "by a builder").unwrap();
    let times = FileTimes::new().set_modified(fs::metadata(&watched.path).unwrap().modified().unwrap());
    OpenOptions::new().write(true).open(&aside).unwrap().set_times(times).unwrap();
    fs::rename(&aside, &watched.path).unwrap();
    watched.assert_swaps(12);
}

/// A volume of a Kubernetes ConfigMap: `policy.wasm` -> `..data/policy.wasm`, `..data` -> the newest folder.
fn config_map(folder: &Path, version: &str) {
    let data = folder.join(format!("..{version}"));
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("policy.wasm"), version).unwrap();
    symlink(format!("..{version}"), folder.join("..data_tmp")).unwrap();
    fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
}

#[test]
fn a_switched_symbolic_link_becomes_active() {
    let folder = folder("config-map");
    let path = folder.join("policy.wasm");
    config_map(&folder, "first");
    symlink("..data/policy.wasm", &path).unwrap();
    let mut watched = Watched::at(&path);
    watched.assert_unchanged();
    config_map(&folder, "the second");
    watched.assert_swaps(10);
    // Another volume of the same content.
    fs::create_dir(folder.join("..copy")).unwrap();
    fs::write(folder.join("..copy/policy.wasm"), "the second").unwrap();
    symlink("..copy", folder.join("..data_tmp")).unwrap();
    fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    watched.assert_unchanged();
}

#[test]
fn half_a_file_is_refused_and_the_whole_becomes_active() {
    let mut watched = Watched::new("half");
    let mut file = File::create(&watched.path).unwrap();
    file.write_all(b"garbage").unwrap();
    watched.assert_refused("not a component:\nno header");
    file.write_all(b" and the rest").unwrap();
    watched.assert_swaps(20);
    // Cut off before it is written.
    watched.write("");
    watched.assert_swaps(0);
    watched.write("third");
    watched.assert_swaps(5);
}

#[test]
fn what_was_refused_is_not_tried_again_until_it_changes() {
    let mut watched = Watched::new("refused");
    watched.write("garbage");
    watched.assert_refused("not a component:\nno header");
    watched.write("garbage");
    watched.assert_unchanged();
    fs::remove_file(&watched.path).unwrap();
    watched.assert_unreadable("No such file or directory");
    watched.write("garbage");
    watched.assert_unchanged();
    watched.write("component");
    watched.assert_swaps(9);
    watched.write("garbage");
    watched.assert_refused("not a component:\nno header");
}

#[test]
fn what_cannot_be_loaded_now_is_tried_again() {
    let mut watched = Watched::new("busy");
    watched.recorder.is_busy.store(true, Ordering::Relaxed);
    watched.write("second");
    for _ in 0..3 {
        assert_eq!(watched.file.look(), Looked::Busy("the compiler is busy".into()));
    }
    // What runs is not loaded over itself for that.
    watched.write("first");
    watched.assert_unchanged();
    watched.write("second");
    assert!(matches!(watched.file.look(), Looked::Busy(_)));
    watched.recorder.is_busy.store(false, Ordering::Relaxed);
    watched.assert_swaps(6);
}

#[test]
fn the_same_content_is_not_loaded_again() {
    let mut watched = Watched::new("touched");
    watched.write("first");
    watched.assert_unchanged();
    File::open(&watched.path).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    watched.assert_unchanged();
    fs::set_permissions(&watched.path, Permissions::from_mode(0o600)).unwrap();
    watched.assert_unchanged();
    let aside = watched.folder().join("aside");
    fs::copy(&watched.path, &aside).unwrap();
    fs::rename(&aside, &watched.path).unwrap();
    watched.assert_unchanged();
}

#[test]
fn a_deleted_file_may_come_back() {
    let mut watched = Watched::new("deleted");
    fs::remove_file(&watched.path).unwrap();
    watched.assert_unreadable("No such file or directory");
    // What the slot runs already is not put into it again: the version to return to would be lost.
    watched.write("first");
    watched.assert_unchanged();
    fs::remove_file(&watched.path).unwrap();
    watched.assert_unreadable("No such file or directory");
    watched.write("second");
    watched.assert_swaps(6);
    fs::remove_dir_all(watched.folder()).unwrap();
    watched.assert_unreadable("No such file or directory");
    fs::create_dir(watched.folder()).unwrap();
    watched.write("third");
    watched.assert_swaps(5);
}

#[test]
fn a_file_that_was_not_there_becomes_active() {
    let path = folder("late").join("policy.wasm");
    let mut watched = Watched::at(&path);
    watched.assert_unreadable("No such file or directory");
    watched.write("later");
    watched.assert_swaps(5);
}

#[test]
fn what_is_no_file_is_not_read() {
    let mut watched = Watched::new("no-file");
    let path = watched.path.clone();
    let away = || fs::remove_file(&path).unwrap();
    away();
    fs::create_dir(&path).unwrap();
    watched.assert_unreadable("not a regular file");
    fs::remove_dir(&path).unwrap();
    symlink("policy.wasm", &path).unwrap();
    watched.assert_unreadable("Too many levels of symbolic links");
    away();
    symlink("other", &path).unwrap();
    symlink("policy.wasm", watched.folder().join("other")).unwrap();
    watched.assert_unchanged();
    away();
    symlink("absent", &path).unwrap();
    watched.assert_unreadable("No such file or directory");
    away();
    // Opening one would wait for a writer.
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    watched.assert_unreadable("not a regular file");
    away();
    symlink("/dev/zero", &path).unwrap();
    watched.assert_unchanged();
    away();
    watched.write("second");
    watched.assert_swaps(6);
}

#[test]
fn a_file_that_is_too_large_is_not_read() {
    let mut watched = Watched::new("large");
    let largest = MAX_COMPONENT_BYTES as u64;
    let file = File::create(&watched.path).unwrap();
    file.set_len(largest + 1).unwrap();
    watched.assert_unreadable(&format!("more than {largest} bytes, expected at most that"));
    file.set_len(largest).unwrap();
    watched.assert_swaps(MAX_COMPONENT_BYTES);
}

#[test]
fn a_file_that_may_not_be_read_is_said() {
    // The owner of everything may read everything.
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        return;
    }
    let mut watched = Watched::new("forbidden");
    watched.write("second");
    fs::set_permissions(&watched.path, Permissions::from_mode(0o000)).unwrap();
    watched.assert_unreadable("Permission denied");
    fs::set_permissions(&watched.path, Permissions::from_mode(0o600)).unwrap();
    watched.assert_swaps(6);
}

/// A watch that runs, and the components it puts into the slot.
struct Running {
    path: PathBuf,
    put: Receiver<Vec<u8>>,
    watch: Option<FileWatch>,
}

/// Only events lead to a look.
const BY_EVENTS: Pace = Pace { quiet: Duration::from_millis(20), patience: HANG, poll: HANG, close: HANG };

impl Running {
    fn start(path: &Path, pace: Pace) -> Self {
        let recorder = Arc::new(Recorder::default());
        let (listener, put) = channel();
        *recorder.listener.lock().unwrap() = Some(listener);
        let file = watched(path, recorder, "first");
        Self { path: path.to_owned(), put, watch: Some(FileWatch::start_at(file, pace).unwrap()) }
    }

    /// Wait until the file is put into the slot with this content; parts of it may come before.
    fn assert_put(&self, content: &str) {
        loop {
            let put = String::from_utf8(self.put.recv_timeout(HANG).expect("the file is put into the slot")).unwrap();
            if put == content {
                return;
            }
            assert!(content.starts_with(&put), "{put} instead of {content}");
        }
    }

    /// Nothing more is put into the slot.
    fn assert_over(mut self) {
        drop(self.watch.take());
        assert_eq!(self.put.iter().count(), 0);
    }
}

#[test]
fn events_lead_to_swaps() {
    let path = folder("events").join("policy.wasm");
    fs::write(&path, "first").unwrap();
    let running = Running::start(&path, BY_EVENTS);
    fs::write(&path, "rewritten").unwrap();
    running.assert_put("rewritten");
    let aside = path.with_extension("tmp");
    fs::write(&aside, "renamed").unwrap();
    fs::rename(&aside, &path).unwrap();
    running.assert_put("renamed");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "back again").unwrap();
    running.assert_put("back again");
    // A refused one does not end the watch, nor does one that the host panics on.
    fs::write(&path, "garbage").unwrap();
    running.assert_put("garbage");
    fs::write(&path, "panic").unwrap();
    running.assert_put("panic");
    fs::remove_file(&path).unwrap();
    symlink("policy.wasm", &path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "good").unwrap();
    running.assert_put("good");
    running.assert_over();
}

#[test]
fn a_switched_volume_leads_to_a_swap() {
    let folder = folder("events-config-map");
    config_map(&folder, "first");
    let path = folder.join("policy.wasm");
    symlink("..data/policy.wasm", &path).unwrap();
    let running = Running::start(&path, BY_EVENTS);
    config_map(&folder, "second");
    running.assert_put("second");
    running.assert_over();
}

#[test]
fn a_change_during_the_start_is_not_lost() {
    let path = folder("events-start").join("policy.wasm");
    fs::write(&path, "first").unwrap();
    let recorder = Arc::new(Recorder::default());
    let (listener, put) = channel();
    *recorder.listener.lock().unwrap() = Some(listener);
    // The engine has read the first.
    fs::write(&path, "later").unwrap();
    let file = watched(&path, recorder, "first");
    let watch = FileWatch::start_at(file, BY_EVENTS).unwrap();
    assert_eq!(put.recv_timeout(HANG).unwrap(), b"later");
    drop(watch);
}

#[test]
fn a_busy_folder_does_not_keep_the_file_from_being_read() {
    let path = folder("events-busy").join("policy.wasm");
    fs::write(&path, "first").unwrap();
    // The folder is never quiet for so long, because of the file beside it.
    let running = Running::start(&path, Pace { quiet: HANG, patience: Duration::from_millis(50), ..BY_EVENTS });
    fs::write(&path, "second").unwrap();
    running.assert_put("second");
    running.assert_over();
}

#[test]
fn a_change_that_no_event_tells_of_is_found() {
    let folder = folder("polled");
    let (path, elsewhere) = (folder.join("now/policy.wasm"), folder.join("elsewhere.wasm"));
    fs::create_dir(folder.join("now")).unwrap();
    fs::write(&path, "first").unwrap();
    let pace = Pace {
        quiet: Duration::from_millis(1),
        patience: Duration::from_millis(10),
        poll: Duration::from_millis(5),
        close: HANG,
    };
    let running = Running::start(&path, pace);
    // The folder is replaced: the system watches the one before.
    fs::rename(folder.join("now"), folder.join("before")).unwrap();
    fs::create_dir(folder.join("now")).unwrap();
    fs::write(&path, "in another folder").unwrap();
    running.assert_put("in another folder");
    // What the link leads to is rewritten in another folder.
    fs::write(&elsewhere, "behind a link").unwrap();
    fs::remove_file(&path).unwrap();
    symlink(&elsewhere, &path).unwrap();
    running.assert_put("behind a link");
    fs::write(&elsewhere, "rewritten behind a link").unwrap();
    running.assert_put("rewritten behind a link");
    running.assert_over();
}

#[test]
fn new_content_of_a_shadows_file_becomes_the_shadow() {
    let path = folder("shadow").join("policy.wasm");
    fs::write(&path, "first").unwrap();
    let recorder = Arc::new(Recorder::default());
    let mut file = watched(&path, recorder.clone(), "first").with_mode(Mode::Shadow);
    assert_eq!(file.look(), Looked::Unchanged);
    fs::write(&path, "second").unwrap();
    assert!(matches!(file.look(), Looked::Swapped(_)));
    assert_eq!(recorder.calls(), [format!("put 6 bytes Shadow {} dispatch", path.display())]);
}

/// Somebody else has put the content into the slot: there is no new version, and nothing to look at again.
#[test]
fn content_that_the_slot_has_already_changes_nothing() {
    let mut watched = Watched::new("present");
    watched.recorder.has_it.store(true, Ordering::Relaxed);
    watched.write("second");
    assert_eq!(watched.file.look(), Looked::Unchanged);
    watched.assert_put(6);
    watched.assert_unchanged();
}

/// The compiler cannot be interrupted.
#[test]
fn dropping_does_not_wait_for_the_compiler() {
    let path = folder("drop").join("policy.wasm");
    fs::write(&path, "second").unwrap();
    let recorder = Arc::new(Recorder::default());
    let (listener, put) = channel();
    *recorder.listener.lock().unwrap() = Some(listener);
    // Nothing is put to an end while this is held.
    let compiling = recorder.calls.lock().unwrap();
    let file = watched(&path, recorder.clone(), "first");
    let watch = FileWatch::start_at(file, Pace { close: Duration::ZERO, ..BY_EVENTS }).unwrap();
    assert_eq!(put.recv_timeout(HANG).unwrap(), b"second");
    drop(watch);
    assert!(compiling.is_empty());
    drop(compiling);
    drop(recorder);
    // The thread ends by itself, and with it the recorder.
    assert_eq!(put.iter().count(), 0);
}

#[test]
fn a_folder_that_is_not_there_is_refused() {
    let path = folder("no-folder").join("absent/policy.wasm");
    let file = watched(&path, Arc::new(Recorder::default()), "first");
    let Err(why) = FileWatch::start(file) else { panic!("it is watched") };
    assert!(why.starts_with(&format!("{}: cannot be watched: ", path.parent().unwrap().display())), "{why}");
}

#[test]
fn a_component_of_a_config_map_is_followed_through_its_links() {
    let folder = folder("config-map");
    let publish = |version: &str, content: &str| {
        fs::create_dir(folder.join(version)).unwrap();
        fs::write(folder.join(version).join("p.wasm"), content).unwrap();
        symlink(version, folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    };
    publish("..1", "first");
    symlink("..data/p.wasm", folder.join("p.wasm")).unwrap();
    let mut watched = Watched::at(&folder.join("p.wasm"));
    watched.assert_unchanged();
    publish("..2", "second one");
    fs::remove_dir_all(folder.join("..1")).unwrap();
    watched.assert_swaps(10);
}
