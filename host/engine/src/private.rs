//! Files and folders that only their owner may use.

use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// The user of this process, read from the owner of its folder in /proc.
fn own_uid() -> Option<u32> {
    fs::metadata("/proc/self").ok().map(|own| own.uid())
}

/// Whether a file belongs to the user of this process.
///
/// # Errors
/// The reason why not; the text follows its path.
pub fn check_owner(metadata: &Metadata) -> Result<(), String> {
    match own_uid() {
        Some(uid) if uid == metadata.uid() => Ok(()),
        Some(uid) => Err(format!("belongs to user {}, must belong to {uid}, who runs this", metadata.uid())),
        None => Err("its owner cannot be compared: /proc is not there".into()),
    }
}

/// Make a folder of mode 0700, and its parents; an existing folder gets that mode.
///
/// # Errors
/// The reason why it is not private; the text follows its path.
pub fn make_dir(dir: &Path) -> Result<(), String> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|error| format!("cannot be made: {error}"))?;
    own_dir(dir)?;
    fs::set_permissions(dir, Permissions::from_mode(0o700)).map_err(|error| format!("cannot be made private: {error}"))
}

/// Whether a folder belongs to this user, and no other user may write to it.
///
/// # Errors
/// The reason why not; the text follows its path.
pub fn check_dir(dir: &Path) -> Result<(), String> {
    let mode = own_dir(dir)?.mode();
    if mode & 0o022 != 0 {
        return Err(format!("has mode {:04o}, must be 0700: other users must not write it", mode & 0o7777));
    }
    Ok(())
}

fn own_dir(dir: &Path) -> Result<Metadata, String> {
    let metadata = fs::symlink_metadata(dir).map_err(|error| error.to_string())?;
    if !metadata.is_dir() {
        return Err("is no folder".into());
    }
    check_owner(&metadata).map(|()| metadata)
}

/// Read a file of at most `max_bytes` that belongs to this user, and that no other user may read or write.
///
/// # Errors
/// The problem and the expectation; the text follows its path, and never includes the contents.
pub fn read(path: &Path, max_bytes: usize) -> Result<Vec<u8>, String> {
    let unreadable = |error| format!("cannot be read: {error}");
    // Opening a pipe would wait for its writer.
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err("must be a regular file".into());
    }
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    check_owner(&metadata)?;
    if metadata.mode() & 0o077 != 0 {
        return Err(format!("has mode {:04o}, must be 0600: other users must not read it", metadata.mode() & 0o7777));
    }
    let mut bytes = Vec::new();
    file.take(max_bytes as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() > max_bytes {
        return Err(format!("must be at most {max_bytes} bytes"));
    }
    Ok(bytes)
}
