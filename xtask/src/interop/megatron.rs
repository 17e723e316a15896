//! Both directions against a real Megatron-Core: its `dist_checkpointing` on CPU processes.

use std::path::Path;

use super::Run;
use crate::process::run;
use crate::{Result, venv};

impl Run<'_> {
    /// Megatron-Core saves; Rust opens and compares everything.
    pub(super) fn megatron(&self) -> Result {
        let state = self.folder.join("state.json");
        run(self.script("interop_megatron.py").arg("state").arg(&state))?;
        println!("Megatron-Core saves");
        run(self.script("interop_megatron.py").arg("save").arg(self.folder))?;
        let saved = [("megatron_plain", "2x2x4"), ("megatron_parallel", "2x1x4")]
            .map(|(name, layout)| (self.folder.join(name), layout));
        for (checkpoint, layout) in &saved {
            run(self.dcp().args(["verify", "--deep", "--quiet"]).arg(checkpoint))?;
            println!("Rust opens what Megatron-Core saved as {layout}");
            self.rust(1, |rust| rust.args(["megatron", "open"]).arg(&state).arg(checkpoint))?;
        }
        self.models()
    }

    /// Models that Megatron-Core saved, as transformers has them.
    fn models(&self) -> Result {
        venv::with_transformers(&venv::python(venv::NEWEST)?)?;
        let (theirs, ours) = (self.folder.join("models"), self.folder.join("models_converted"));
        println!("transformers and Megatron-Core save models");
        run(self.script("interop_megatron_hf.py").arg("save").arg(&theirs))?;
        for entry in std::fs::read_dir(&theirs)? {
            let entry = entry?;
            let made = ours.join(entry.file_name());
            let map = |way: &str, from: &Path, to: &str| {
                let to = made.join(to);
                self.rust(1, |rust| rust.arg("map").arg(way).arg(from).arg(&to))
            };
            map("to-hf", &entry.path().join("megatron"), "hf")?;
        }
        run(self.script("interop_megatron_hf.py").arg("check").args([&theirs, &ours]).arg("hf"))
    }
}
