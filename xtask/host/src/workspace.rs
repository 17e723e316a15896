//! What cargo and git know about this tree.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::{Result, process};

/// The root of the checkout.
pub fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

/// `cargo`, as the one that started this program.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    without_own_package(&mut cargo);
    cargo
}

/// Removes the variables with which cargo describes the package of this program. The build script of ring runs again when
/// `CARGO_PKG_NAME` changes: a build from here would compile ring and all that is built on it again, and the next
/// build from a terminal once more.
pub fn without_own_package(command: &mut Command) {
    let of_package =
        |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(of_package) {
            command.env_remove(name);
        }
    }
}

/// Builds the command and the Rust half of `interop`, and returns the folder of the command.
///
/// The same selection wherever either is needed: cargo unifies features over what it selects, and over
/// the development dependencies of examples, so this one finds compiled what the tests have compiled.
pub fn build() -> Result<PathBuf> {
    let selection = ["build", "--quiet", "--workspace", "--bin", "dcp", "--example", "interop"];
    process::run(cargo().args(selection))?;
    Ok(target()?.join("debug"))
}

/// A crate of this workspace.
#[derive(Debug)]
pub struct Package {
    /// Its name for cargo.
    pub name: String,
    /// Its folder, relative to the root.
    pub dir: PathBuf,
    /// Its features but `default`, sorted.
    pub features: Vec<String>,
    /// Whether it goes to crates.io.
    pub is_published: bool,
    /// Its library by its name in Rust, if others can use it as one.
    pub library: Option<String>,
}

impl Package {
    /// Whether programs of others are built with it.
    pub fn is_public(&self) -> bool {
        self.is_published && self.library.is_some()
    }
}

/// `cargo metadata` with all features, for this platform.
pub fn resolved() -> Result<Value> {
    metadata(&["--all-features", "--filter-platform", &host()?])
}

/// The platform that this program runs on, as rustc names it.
pub fn host() -> Result<String> {
    let rustc = process::output(Command::new("rustc").arg("-vV"))?;
    let host = rustc.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc names no host")?.to_owned())
}

/// The crates of this workspace, in the order of `Cargo.toml`.
pub fn packages() -> Result<Vec<Package>> {
    let metadata = metadata(&["--no-deps"])?;
    let mut packages = Vec::new();
    for package in list(&metadata, "packages") {
        let manifest = Path::new(text(package, "manifest_path"));
        let dir = manifest.parent().and_then(|dir| dir.strip_prefix(root()).ok());
        let features = package.get("features").and_then(Value::as_object);
        let mut features: Vec<String> =
            features.into_iter().flat_map(|f| f.keys().cloned()).collect();
        features.retain(|feature| feature != "default");
        features.sort();
        let is_published = package.get("publish").is_none_or(Value::is_null);
        packages.push(Package {
            name: text(package, "name").to_owned(),
            dir: dir.ok_or("a crate outside the checkout")?.to_owned(),
            features,
            is_published,
            library: library(package),
        });
    }
    Ok(packages)
}

fn library(package: &Value) -> Option<String> {
    let is_library = |target: &&Value| list(target, "kind").iter().any(|kind| kind == "lib");
    let library = list(package, "targets").iter().find(is_library)?;
    Some(text(library, "name").replace('-', "_"))
}

/// Where cargo builds.
pub fn target() -> Result<PathBuf> {
    let metadata = metadata(&["--no-deps"])?;
    Ok(PathBuf::from(text(&metadata, "target_directory")))
}

fn metadata(args: &[&str]) -> Result<Value> {
    let json = process::output(cargo().args(["metadata", "--format-version=1"]).args(args))?;
    Ok(serde_json::from_str(&json)?)
}

/// A field that is a list, empty if it is not there.
pub fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value.get(field).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// A field that is a text, empty if it is not there.
pub fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// Every file that belongs to the checkout, relative to the root and sorted: what git tracks or
/// would track, or in an exported tree without git everything but build output.
pub fn files() -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.current_dir(root()).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let mut files = match git.output() {
        Ok(output) if output.status.success() => String::from_utf8(output.stdout)?
            .split_terminator('\0')
            .map(PathBuf::from)
            .filter(|file| root().join(file).is_file())
            .collect(),
        _ => walk(root())?,
    };
    files.sort();
    files.dedup();
    Ok(files)
}

fn walk(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            if !entry.file_type()?.is_dir() {
                files.push(path.strip_prefix(root())?.to_owned());
            } else if entry.file_name() != "target" && entry.file_name() != ".git" {
                folders.push(path);
            }
        }
    }
    Ok(files)
}

/// Commit of the checkout, or `unknown`.
pub fn commit() -> String {
    let mut git = Command::new("git");
    git.current_dir(root()).args(["rev-parse", "--short", "HEAD"]);
    match git.output() {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        _ => "unknown".to_owned(),
    }
}
