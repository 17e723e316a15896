//! The Python package against a real PyTorch: the tests of `dcp-python/tests`, and its types.

use std::path::Path;
use std::process::Command;

use xtask_host::process::run;
use xtask_host::{Result, emulators, venv, workspace};

use crate::Run;

/// What the tests need besides PyTorch.
const TOOLS: &[&str] = &["pytest==9.0.2", "mypy==1.19.0", "zstandard==0.25.0"];

/// The frameworks that save through the package, besides the libraries of the other steps. Without them their tests
/// are skipped.
const FRAMEWORKS: &[&str] = &["lightning==2.6.6"];

impl Run<'_> {
    /// Builds the package as a folder that Python imports, with the extension module of a debug build, and
    /// runs its tests. `all` also runs those of frameworks and checks its types, for the newest PyTorch.
    pub(crate) fn python_package(&self, all: bool) -> Result {
        venv::add(&self.python, "python-tools", TOOLS)?;
        if all {
            venv::with_libraries(&self.python)?;
            venv::add(&self.python, "frameworks", FRAMEWORKS)?;
        }
        let site = self.folder.join("site");
        self.lay_out(&site)?;
        let root = workspace::root().join("dcp-python");
        let store = emulators::Emulators::s3_only()?;
        let mut tests = Command::new(&self.python);
        tests.envs(store.variables());
        tests.env("AWS_ENDPOINT_URL", store.variable("DCP_TEST_S3_ENDPOINT")?);
        tests.current_dir(&root).env("PYTHONPATH", &site).env("PYTHONDONTWRITEBYTECODE", "1");
        run(tests.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]))?;
        if all {
            let mut types = Command::new(&self.python);
            types.current_dir(&root).env("MYPYPATH", &site);
            let cache = self.folder.join("mypy");
            run(types.args(["-m", "mypy", "--strict", "-p", "distcp", "--cache-dir"]).arg(cache))?;
        }
        Ok(())
    }

    /// The package in a folder: its Python files, and the extension module beside them.
    fn lay_out(&self, site: &Path) -> Result {
        let root = workspace::root().join("dcp-python");
        let target = workspace::target()?;
        let mut build = workspace::cargo();
        build.args(["build", "--locked", "--manifest-path"]).arg(root.join("Cargo.toml"));
        run(build.arg("--target-dir").arg(&target))?;
        std::fs::create_dir_all(site)?;
        run(Command::new("cp").arg("-R").arg(root.join("python/distcp")).arg(site))?;
        let name = if cfg!(target_os = "macos") { "lib_native.dylib" } else { "lib_native.so" };
        let module = site.join("distcp/_native.abi3.so");
        std::fs::copy(target.join("debug").join(name), module)?;
        Ok(())
    }
}
