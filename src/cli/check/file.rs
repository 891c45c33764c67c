//! The file of an embedded database: whether this user can make or write it, and who else can read it.
//!
//! Nothing is created or changed: the operating system is asked what it would allow. So root, too, learns of a file system
//! that is mounted read-only.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustix::fs::{Access, access};

/// Bits of a file's mode: group and others.
const OTHERS: u32 = 0o077;

/// Why a file that is not there cannot be made.
pub(super) fn cannot_be_made(path: &Path) -> Option<String> {
    // SQLite puts two files beside it, and `run` a third.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shown = folder.display();
    match std::fs::metadata(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Some(format!("its folder {shown} does not exist")),
        Err(error) => Some(format!("its folder {shown} cannot be reached: {error}")),
        Ok(found) if !found.is_dir() => Some(format!("{shown} is not a folder")),
        Ok(_) => {
            let refused = access(folder, Access::WRITE_OK | Access::EXEC_OK).err()?;
            Some(format!("this user may not make files in its folder {shown}: {refused}"))
        }
    }
}

/// Why a file cannot be written, or the files beside it.
pub(super) fn cannot_be_written(path: &Path) -> Option<String> {
    let refused = path.exists().then(|| access(path, Access::READ_OK | Access::WRITE_OK).err()).flatten();
    let refused = refused.map(|refused| format!("this user may not write {}: {refused}", path.display()));
    refused.or_else(|| cannot_be_made(path))
}

/// What others on this machine could read: payloads, and what was sent to providers.
pub(super) fn readable_by_others(path: &Path) -> Option<String> {
    let mode = std::fs::metadata(path).ok()?.permissions().mode();
    (mode & OTHERS != 0).then(|| format!("others on this machine can reach its file: its mode is {:03o}", mode & 0o777))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_takes_no_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let said = |path: &Path| cannot_be_made(path).unwrap_or_default();
        assert_eq!(said(&dir.path().join("new.db")), "");
        assert_eq!(said(Path::new("new.db")), "", "the current folder");
        let missing = dir.path().join("missing");
        assert_eq!(said(&missing.join("new.db")), format!("its folder {} does not exist", missing.display()));
        assert_eq!(said(&file.join("new.db")), format!("{} is not a folder", file.display()));
        assert!(said(&file.join("below/new.db")).contains("cannot be reached: Not a directory"));
        assert_eq!(cannot_be_written(&file), None);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was made");
    }
}
