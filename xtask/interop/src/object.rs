//! Both directions through S3: PyTorch writes and reads with fsspec and s3fs, and s3torchconnector
//! and OLMo-core write.

use std::process::Command;

use crate::Run;
use xtask_host::process::run;
use xtask_host::{Result, emulators, venv};

/// What `interop_object.py` saves.
const SAVED: &[&str] = &["dtensors", "sharded_tensors", "plain", "fsdp2", "s3torchconnector"];

impl Run<'_> {
    /// PyTorch saves on 4 ranks, Rust loads on 2; Rust saves on 3 ranks, PyTorch loads on 2.
    pub(super) fn object(&self) -> Result {
        let store = emulators::Emulators::s3_only()?;
        let bucket = store.variable("DCP_TEST_S3_BUCKET")?;
        let endpoint = store.variable("DCP_TEST_S3_ENDPOINT")?;
        let with_store = |command: &mut Command| {
            command.envs(store.variables()).env("AWS_ENDPOINT_URL", endpoint);
        };

        println!("PyTorch and s3torchconnector save to S3");
        let (url, expected) = (format!("s3://{bucket}/torch"), self.folder.join("torch"));
        let mut save = self.script("interop_object.py");
        with_store(&mut save);
        run(save.arg(&url).arg(&expected))?;
        println!("PyTorch → S3 → Rust on 2 ranks");
        self.rust(2, |rust| {
            with_store(rust);
            rust.arg("load-from").arg(&url).arg(&expected).args(SAVED)
        })?;

        println!("OLMo-core → S3 → Rust");
        let (url, saved) = (format!("s3://{bucket}/olmo"), self.folder.join("olmo"));
        let mut save = Self::script_of(&venv::olmo()?, "interop_olmo.py");
        with_store(&mut save);
        run(save.arg("save").arg(&saved).arg(&url))?;
        for layout in ["nested", "flat"] {
            let url = format!("{url}/{layout}");
            let (mut verify, mut diff) = (self.dcp(), self.dcp());
            with_store(&mut verify);
            with_store(&mut diff);
            run(verify.args(["verify", "--deep", &url]))?;
            run(diff.arg("diff").arg(saved.join(layout)).arg(&url))?;
        }

        let (url, state) = (format!("s3://{bucket}/rust"), self.folder.join("state.json"));
        run(self.script("interop_state.py").arg(&state))?;
        for (name, how, salt) in [("plain", "plain", "5"), ("by_size", "by-size", "6")] {
            println!("Rust saves {name} to S3 on 3 ranks");
            self.rust(3, |rust| {
                with_store(rust);
                rust.arg("save").arg(&state).arg(format!("{url}/{name}")).args([how, salt])
            })?;
        }
        println!("Rust → S3 → PyTorch on 2 ranks");
        let mut load = self.script("interop_load.py");
        with_store(&mut load);
        run(load.arg("state").arg(&state).arg(&url).args(["2", "plain=5", "by_size=6"]))
    }
}
