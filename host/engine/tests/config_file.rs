//! Where meridian.toml is looked up, and which files are refused.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use meridian_engine::config_file::{ConfigFile, MAX_BYTES, Surroundings};

/// A folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder.canonicalize().unwrap()
}

fn write(path: PathBuf, budget: u32) -> PathBuf {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, format!("[scheduler]\noutput_tpot_budget_ms = {budget}\n")).unwrap();
    path
}

#[test]
fn the_first_file_that_exists_is_read() {
    let folder = folder("lookup");
    let mut around = Surroundings { named: None, home: Some(folder.join("home")), working_dir: folder.join("work") };
    std::fs::create_dir_all(&around.working_dir).unwrap();
    let budget = |file: &ConfigFile| file.parsed.config.scheduler.output_tpot_budget_ms;

    let none = around.load(None).unwrap();
    assert_eq!((none.path.as_deref(), budget(&none)), (None, 20.0));
    assert!(!none.parsed.fields.is_empty());

    let in_home = write(folder.join("home/.config/meridian/meridian.toml"), 11);
    let found = around.load(None).unwrap();
    assert_eq!((found.path, found.parsed.config.scheduler.output_tpot_budget_ms), (Some(in_home), 11.0));

    write(folder.join("work/meridian.toml"), 12);
    assert_eq!(budget(&around.load(None).unwrap()), 12.0);

    around.named = Some(write(folder.join("elsewhere/m.toml"), 13).into());
    let named = around.load(None).unwrap();
    assert_eq!((budget(&named), &named.base_dir), (13.0, &folder.join("elsewhere")));

    write(folder.join("work/explicit.toml"), 14);
    let explicit = around.load(Some(Path::new("explicit.toml"))).unwrap();
    assert_eq!((budget(&explicit), &explicit.base_dir), (14.0, &folder.join("work")));

    around.named = Some(folder.join("absent.toml").into());
    assert!(around.load(None).unwrap_err().to_string().contains("absent.toml: cannot be read: "));
}

#[test]
fn relative_paths_start_from_the_path_as_given() {
    let folder = folder("linked");
    write(folder.join("..2026/meridian.toml"), 15);
    symlink("..2026", folder.join("..data")).unwrap();
    symlink("..data/meridian.toml", folder.join("meridian.toml")).unwrap();
    let found = Surroundings::default().load(Some(&folder.join("meridian.toml"))).unwrap();
    assert_eq!(found.base_dir, folder, "the folder of the link, not the one that a ConfigMap replaces");
    let inside = Surroundings { working_dir: folder.clone(), ..Surroundings::default() };
    assert_eq!(inside.load(None).unwrap().base_dir, folder);
}

#[test]
fn unfit_files_are_refused_in_one_line() {
    let folder = folder("unfit");
    let around = Surroundings::default();
    let path = folder.join("meridian.toml");
    let refusal = |path: &Path| {
        let message = around.load(Some(path)).unwrap_err().to_string();
        assert!(!message.contains('\n'), "{message}");
        message.strip_prefix(&format!("{}: ", path.display())).unwrap().to_owned()
    };
    assert!(refusal(&path).starts_with("cannot be read: "));
    assert_eq!(refusal(&folder), "is a folder, expected a TOML file");
    std::fs::write(&path, [b'#', 0xff]).unwrap();
    assert_eq!(refusal(&path), "is not UTF-8 text, expected a TOML file");
    let comment = "#".repeat(MAX_BYTES as usize);
    std::fs::write(&path, &comment).unwrap();
    assert!(around.load(Some(&path)).is_ok());
    std::fs::write(&path, comment + "#").unwrap();
    assert_eq!(refusal(&path), "is larger than 1 MiB, expected a TOML file of at most that");
    std::fs::write(&path, "[scheduler]\nmax_defer_ms = 0").unwrap();
    assert_eq!(refusal(&path), "scheduler.max_defer_ms: 0: must be above 0");
}
