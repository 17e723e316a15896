//! Virtual environments with a real PyTorch, kept outside the checkout.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Result, process};

/// The PyTorch that CI proves interoperability with.
pub const NEWEST: &str = "2.15.0";

/// Written last, so that half an environment is not used.
const COMPLETE: &str = ".complete";

/// The Python of an environment with this torch; makes the environment if there is none yet.
pub fn python(torch: &str) -> Result<PathBuf> {
    let folder = cache()?.join(format!("torch-{torch}"));
    let python = folder.join("bin").join("python");
    if !folder.join(COMPLETE).is_file() {
        create(&folder, &python, torch).map_err(|error| {
            format!(
                "cannot make a virtual environment with torch {torch} in {}: {error}\n\
                 It needs python3 with its venv module (Debian: apt-get install python3-venv) and \
                 a package index that pip can reach, and a Python that torch {torch} has wheels for.",
                folder.display()
            )
        })?;
    }
    Ok(python)
}

/// The libraries that CI proves interoperability with. transformers opens MXFP4 only with
/// accelerate, and PyTorch compresses only with zstandard.
const LIBRARIES: &[&str] =
    &["transformers==5.23.0", "accelerate==1.15.0", "torchao==0.18.0", "zstandard==0.25.0"];

/// Adds the libraries to an environment. They are large, so only that of the newest torch gets
/// them.
pub fn with_libraries(python: &Path) -> Result {
    add(python, "libraries", LIBRARIES)
}

/// Adds packages to an environment, once; `name` is that of the list.
pub fn add(python: &Path, name: &str, packages: &[&str]) -> Result {
    let folder = python.parent().and_then(Path::parent).unwrap_or(python);
    let complete = folder.join(format!(".{name}"));
    let wanted = packages.join(" ");
    if std::fs::read_to_string(&complete).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    println!("installing {wanted} in {}", folder.display());
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    process::run(pip.args(packages))?;
    std::fs::write(complete, wanted)?;
    Ok(())
}

fn create(folder: &Path, python: &Path, torch: &str) -> Result {
    println!("making {}", folder.display());
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder))?;
    let numpy = if before(torch, (2, 5)) { "numpy<2" } else { "numpy" };
    let torch = format!("torch=={torch}");
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    process::run(pip.args([&torch, numpy, "safetensors"]))?;
    std::fs::write(folder.join(COMPLETE), "")?;
    Ok(())
}

/// The OLMo-core that CI proves interoperability with.
const OLMO: &str = "3.0.0";
/// What it needs beyond PyTorch to save and load.
const OLMO_NEEDS: &[&str] = &[
    "cached-path>=1.7.2",
    "filelock<4.0,>=3.4",
    "requests",
    "packaging",
    "dataclass-extensions>=0.3.0",
    "pyyaml",
    "rich",
    "importlib_resources",
    "bettermap",
];

/// The Python of an environment with OLMo-core on top of that of [`NEWEST`].
pub fn olmo() -> Result<PathBuf> {
    on_top(&format!("olmo-{OLMO}"), &[&format!("ai2-olmo-core=={OLMO}")], OLMO_NEEDS)
}

/// The Megatron-Core that CI proves interoperability with: the newest on PyPI.
pub const MEGATRON: &str = "0.16.1";
/// What it needs beyond PyTorch to save and load.
const MEGATRON_NEEDS: &[&str] = &["packaging>=24.2", "psutil"];

/// The Python of an environment with this Megatron-Core on top of that of [`NEWEST`].
pub fn megatron(version: &str) -> Result<PathBuf> {
    on_top(&format!("megatron-{version}"), &[&format!("megatron-core=={version}")], MEGATRON_NEEDS)
}

/// What PyTorch writes to and reads from S3 with.
const S3FS: &str = "s3fs==2026.9.0";
/// A writer of checkpoints to S3 by Amazon.
const S3_TORCH_CONNECTOR: &str = "s3torchconnector==1.5.0";
/// What both need beyond PyTorch.
const OBJECT_NEEDS: &[&str] = &[
    "fsspec==2026.9.0",
    "aiobotocore>=2.19",
    "aiohttp",
    "s3torchconnectorclient==1.5.0",
    "tenacity",
];

/// The Python of an environment with clients of S3 on top of that of [`NEWEST`].
pub fn object() -> Result<PathBuf> {
    on_top("object", &[S3FS, S3_TORCH_CONNECTOR], OBJECT_NEEDS)
}

/// Packages that have the schemas of Kubernetes and JobSet in them.
const KUBERNETES: [&str; 2] = ["kubernetes-validate==1.37.0", "kubeflow-trainer-api==2.3.0"];

/// The Python of an environment with schemas of Kubernetes; it has no torch.
pub fn kubernetes() -> Result<PathBuf> {
    let folder = cache()?.join("kubernetes");
    let python = folder.join("bin").join("python");
    let complete = folder.join(COMPLETE);
    let wanted = KUBERNETES.join(" ");
    if std::fs::read_to_string(&complete).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    println!("making {}", folder.display());
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    process::run(pip.args(KUBERNETES))?;
    std::fs::write(complete, wanted)?;
    Ok(python)
}

/// The Python of an environment in which `packages`, which request a PyTorch but run on this one,
/// and what they `need` are on top of the environment of [`NEWEST`].
fn on_top(name: &str, packages: &[&str], needs: &[&str]) -> Result<PathBuf> {
    let torch = python(NEWEST)?;
    let folder = cache()?.join(name);
    let python = folder.join("bin").join("python");
    if !folder.join(COMPLETE).is_file() {
        println!("making {}", folder.display());
        process::run(Command::new(&torch).args(["-m", "venv", "--clear"]).arg(&folder))?;
        let site = "import site; print(site.getsitepackages()[0])";
        let torch_site = process::output(Command::new(&torch).args(["-c", site]))?;
        let site = process::output(Command::new(&python).args(["-c", site]))?;
        std::fs::write(Path::new(site.trim()).join("torch.pth"), torch_site)?;
        let pip = |more: &[&str]| {
            let mut pip = Command::new(&python);
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
            process::run(pip.args(more))
        };
        pip(&[&["--no-deps"], packages].concat())?;
        pip(needs)?;
        std::fs::write(folder.join(COMPLETE), "")?;
    }
    Ok(python)
}

/// Whether `version` is older than this major and minor number. Wheels until 2.4 were built
/// against numpy 1.
fn before(version: &str, (major, minor): (u32, u32)) -> bool {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < (major, minor)
}

/// `$DCP_INTEROP_CACHE`, else `dcp-interop` in the user's cache folder.
pub fn cache() -> Result<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|f| !f.is_empty()).map(PathBuf::from);
    folder("DCP_INTEROP_CACHE")
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("dcp-interop")))
        .or_else(|| Some(folder("HOME")?.join(".cache").join("dcp-interop")))
        .ok_or_else(|| "neither DCP_INTEROP_CACHE, XDG_CACHE_HOME nor HOME is set".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert!(before("2.4.1", (2, 5)));
        assert!(!before("2.15.0", (2, 5)));
        assert!(!before("2.5", (2, 5)));
    }
}
