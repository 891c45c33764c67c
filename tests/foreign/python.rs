//! Python packages in an environment of their own, kept between runs under `target/tmp`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Debian's own interpreter; its `venv` needs the package python3-venv, which tests/run installs.
const SYSTEM_PYTHON: &str = "/usr/bin/python3";
/// What is asked of PyPI, exactly.
const PACKAGES: [&str; 2] = ["localstripe==1.15.10", "stripe==16.1.0"];

/// The interpreter that has the packages. The first call may download them.
pub fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(installed)
}

/// The path of a script of this test.
pub fn script(name: &str) -> String {
    format!("{}/tests/foreign/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn installed() -> PathBuf {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(kept).unwrap();
    let (home, ready) = (kept.join("foreign-python"), kept.join("foreign-python.ready"));
    let python = home.join("bin/python");
    // Two runs at once would install into each other's; the lock goes with the file.
    let lock = File::create(kept.join("foreign-python.lock")).unwrap();
    lock.lock().unwrap();
    let wanted = PACKAGES.join(" ");
    let is_there = std::fs::read_to_string(&ready).is_ok_and(|text| text == wanted) && answers(&python);
    if !is_there {
        let _ = std::fs::remove_file(&ready);
        let _ = std::fs::remove_dir_all(&home);
        run(Command::new(SYSTEM_PYTHON).args(["-m", "venv"]).arg(&home), "install python3-venv");
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES);
        run(&mut pip, "pip must reach PyPI, or an index that its own settings name");
        std::fs::write(&ready, wanted).unwrap();
    }
    python
}

/// A kept environment is of no use once the interpreter below it has changed.
fn answers(python: &Path) -> bool {
    let import = Command::new(python).args(["-c", "import localstripe, stripe"]).stderr(Stdio::null()).status();
    import.is_ok_and(|status| status.success())
}

fn run(command: &mut Command, mend: &str) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error} ({mend})"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {mend}\n{out}{err}");
}
