//! The programs that emulators are made of, kept in the cache folder of the virtual environments.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Result, process, venv};

/// What the S3 emulator, the HTTP server and the making of an Azure container need.
const PACKAGES: &[&str] = &[
    "moto[s3]==5.2.5",
    "flask==3.1.3",
    "flask-cors==6.0.5",
    "aiohttp==3.14.5",
    "azure-storage-blob==12.31.1",
];
/// The Azure emulator, of npm.
const AZURITE: &str = "azurite@3.35.0";

/// Written last, with what is installed, so that half an installation is not used.
const COMPLETE: &str = ".complete";

/// The Python with [`PACKAGES`]; installs them if they are not there.
pub(super) fn python() -> Result<PathBuf> {
    let folder = venv::cache()?.join("emulators");
    let python = folder.join("bin").join("python");
    if !is_complete(&folder, &PACKAGES.join(" ")) {
        println!("making {}", folder.display());
        process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        process::run(pip.args(PACKAGES))?;
        std::fs::write(folder.join(COMPLETE), PACKAGES.join(" "))?;
    }
    Ok(python)
}

/// The script that starts Azurite's blob service in node; installs it if it is not there.
pub(super) fn azurite() -> Result<PathBuf> {
    if !process::succeeds(Command::new("node").arg("--version")) {
        return Err("there is no node here; Debian has it as the package nodejs".into());
    }
    let folder = venv::cache()?.join("azurite");
    if !is_complete(&folder, AZURITE) {
        println!("making {}", folder.display());
        std::fs::create_dir_all(&folder)?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix"]);
        process::run(npm.arg(&folder).arg(AZURITE))?;
        std::fs::write(folder.join(COMPLETE), AZURITE)?;
    }
    Ok(folder.join("node_modules/azurite/dist/src/blob/main.js"))
}

fn is_complete(folder: &Path, wanted: &str) -> bool {
    std::fs::read_to_string(folder.join(COMPLETE)).is_ok_and(|installed| installed == wanted)
}
