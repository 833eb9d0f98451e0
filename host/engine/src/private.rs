//! Files and folders that only their owner may use.

use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use meridian_core::file::open_regular;

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

/// Read a file of at most `max_bytes` that belongs to this user, and that no other user may read or write. One of root's
/// may be readable for a group of this process, as the files of Kubernetes' Secrets are.
///
/// # Errors
/// The problem and the expectation; the text follows its path, and never includes the contents.
pub fn read(path: &Path, max_bytes: usize) -> Result<Vec<u8>, String> {
    let unreadable = |error| format!("cannot be read: {error}");
    let (file, metadata) = open_regular(path).map_err(unreadable)?;
    check_private(&metadata)?;
    let mut bytes = Vec::new();
    file.take(max_bytes as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() > max_bytes {
        return Err(format!("must be at most {max_bytes} bytes"));
    }
    Ok(bytes)
}

fn check_private(metadata: &Metadata) -> Result<(), String> {
    let own = own_uid().ok_or("its owner cannot be compared: /proc is not there")?;
    let file = Owned { uid: metadata.uid(), gid: metadata.gid(), mode: metadata.mode() & 0o7777 };
    file.check(own, &own_gids())
}

/// The groups of this process, read from its status in /proc.
fn own_gids() -> Vec<u32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let lines = status.lines().filter_map(|line| line.strip_prefix("Gid:").or_else(|| line.strip_prefix("Groups:")));
    lines.flat_map(str::split_ascii_whitespace).filter_map(|gid| gid.parse().ok()).collect()
}

struct Owned {
    uid: u32,
    gid: u32,
    mode: u32,
}

impl Owned {
    /// Whether the file is private to the user `own`, with these groups.
    fn check(&self, own: u32, gids: &[u32]) -> Result<(), String> {
        let Self { uid, gid, mode } = *self;
        if ![0, own].contains(&uid) {
            return Err(format!("belongs to user {uid}, must belong to {own}, who runs this, or to root"));
        }
        let allowed = if uid == 0 && gids.contains(&gid) { 0o740 } else { 0o700 };
        if mode & 0o777 & !allowed != 0 {
            let most = "0600, or 0640 where root owns it and its group is one of this user";
            return Err(format!("has mode {mode:04o}, must be {most}: other users must not read it"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_of_root_may_be_its_groups() {
        let is_private = |uid, gid, mode| Owned { uid, gid, mode }.check(1000, &[1000, 2000]).is_ok();
        for mode in [0o400, 0o600, 0o700] {
            assert!(is_private(1000, 9, mode) && is_private(0, 9, mode), "{mode:o}");
        }
        for mode in [0o440, 0o640, 0o740] {
            assert!(is_private(0, 2000, mode), "{mode:o}");
            assert!(!is_private(0, 0, mode), "{mode:o}: a group that this user is not in");
            assert!(!is_private(1000, 2000, mode), "{mode:o}: root did not say so");
        }
        for mode in [0o460, 0o450, 0o444, 0o404, 0o601, 0o660, 0o644] {
            assert!(!is_private(0, 2000, mode) && !is_private(1000, 1000, mode), "{mode:o}");
        }
        assert!(!is_private(1001, 2000, 0o600));
        let why = Owned { uid: 7, gid: 7, mode: 0o600 }.check(1000, &[]);
        assert_eq!(why, Err("belongs to user 7, must belong to 1000, who runs this, or to root".into()));
        assert!(!own_gids().is_empty());
    }
}
