//! Checks of files for `check`: whether this user can create or write an embedded database's file, and who else can
//! read it or a provider's secret.
//!
//! They create and change nothing: they ask the operating system what it would allow. So root, too, learns about a
//! read-only file system.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Access, access};

use super::Finding;
use crate::config::FIX_FILE_MODE;
use crate::files::{self, READ_TIMEOUT};
use crate::provider::secret_grants::{SecretGrants, SecretReference, SecretUse};

/// Bits of a file's mode: group and others.
const GROUP_AND_OTHERS: u32 = 0o077;

/// Why a missing file cannot be created.
pub(super) fn creation_problem(path: &Path) -> Option<String> {
    // SQLite creates two files beside it, and `run` a third.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shown = folder.display();
    match std::fs::metadata(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Some(format!("its folder {shown} does not exist")),
        Err(error) => Some(format!("its folder {shown} cannot be reached: {error}")),
        Ok(found) if !found.is_dir() => Some(format!("{shown} is not a folder")),
        Ok(_) => {
            let refused = access(folder, Access::WRITE_OK | Access::EXEC_OK).err()?;
            Some(format!("this user may not create files in its folder {shown}: {refused}"))
        }
    }
}

/// Why a file or the files beside it cannot be written.
pub(super) fn write_problem(path: &Path) -> Option<String> {
    let refused = path.exists().then(|| access(path, Access::READ_OK | Access::WRITE_OK).err()).flatten();
    let refused = refused.map(|refused| format!("this user may not write {}: {refused}", path.display()));
    refused.or_else(|| creation_problem(path))
}

/// A warning if other users of this machine can read the file with payloads and requests.
pub(super) fn readable_by_others(path: &Path) -> Option<String> {
    let mode = std::fs::metadata(path).ok()?.permissions().mode();
    (mode & GROUP_AND_OTHERS != 0)
        .then(|| format!("others on this machine can reach its file: its mode is {:03o}", mode & 0o777))
}

/// Secrets of provider rows in files that others on this machine may read. Files without a grant are not looked at.
pub(super) async fn exposed_secrets(sent: &[(String, SecretUse)], grants: &SecretGrants) -> Vec<Finding> {
    let paths = sent.iter().filter_map(|(_, used)| match &used.reference {
        SecretReference::File(path) if grants.permits(&used.reference, &used.host) => Some(path.clone()),
        SecretReference::File(_) | SecretReference::Env(_) => None,
    });
    let paths: BTreeSet<PathBuf> = paths.collect();
    let judged = tokio::task::spawn_blocking(move || judge_modes(paths, files::mode_of, READ_TIMEOUT));
    judged.await.unwrap_or_default()
}

/// Looks at all files within one time, however many of them hang.
fn judge_modes(paths: BTreeSet<PathBuf>, mode_of: fn(&Path) -> Option<u32>, within: Duration) -> Vec<Finding> {
    let judge = move |path: PathBuf| {
        let mode = mode_of(&path).filter(|mode| files::is_world_readable(*mode))?;
        let what = format!("others on this machine may read it: its mode is {mode:03o}");
        Some(Finding::warning(format!("secret file:{}", path.display()), what, FIX_FILE_MODE))
    };
    let judged = files::run_with_timeout(within, move || paths.into_iter().filter_map(judge).collect());
    judged.unwrap_or_else(|error| {
        let what = format!("the modes of their files are unknown: {error}");
        vec![Finding::warning("secrets of providers", what, error.fix().unwrap_or("Run check again"))]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn secret_readable_by_others_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, mode: u32| {
            let path = dir.path().join(name);
            std::fs::write(&path, "hunter2").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let reference = SecretReference::File(path);
            ("acme".to_owned(), SecretUse { reference, host: "x.example".to_owned() })
        };
        let sent = [at("open", 0o644), at("group", 0o440), at("own", 0o600), at("ungranted", 0o644)];
        let granted = sent[..3].iter().map(|(_, used)| format!("{}@x.example", used.reference));
        let grants = SecretGrants::parse(&granted.collect::<Vec<_>>()).unwrap();
        let found = exposed_secrets(&sent, &grants).await;
        let found: Vec<String> =
            found.into_iter().map(|finding| format!("{}: {}", finding.subject, finding.what)).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("/open: others on this machine may read it: its mode is 644"), "{found:?}");
    }

    #[test]
    fn hanging_secret_files_share_one_timeout() {
        let paths = (0..1_000).map(|number| PathBuf::from(format!("/hung/{number}"))).collect();
        let hung = |_: &Path| {
            std::thread::park();
            None
        };
        let found = judge_modes(paths, hung, Duration::from_millis(10));
        assert!(found.len() == 1 && found[0].what.contains("not read within 0.01 s"), "{found:?}");
    }

    #[test]
    fn unwritable_folder_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let problem = |path: &Path| creation_problem(path).unwrap_or_default();
        assert_eq!(problem(&dir.path().join("new.db")), "");
        assert_eq!(problem(Path::new("new.db")), "", "the current folder");
        let missing = dir.path().join("missing");
        assert_eq!(problem(&missing.join("new.db")), format!("its folder {} does not exist", missing.display()));
        assert_eq!(problem(&file.join("new.db")), format!("{} is not a folder", file.display()));
        assert!(problem(&file.join("below/new.db")).contains("cannot be reached: Not a directory"));
        assert_eq!(write_problem(&file), None);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was created");
    }
}
