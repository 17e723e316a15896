//! The backends that are read without a plug-in.

use crate::disk::config::CheckpointingConfig;
use crate::error::MegatronError;

/// The backends that this crate reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShardedBackend {
    TorchDist,
    Zarr,
}

/// The backend that wrote the tensors; an error unless this crate reads it.
pub(super) fn known_backend(config: &CheckpointingConfig) -> Result<ShardedBackend, MegatronError> {
    if let Some(common) = config.common.as_ref().filter(|common| !common.is("torch")) {
        let backend = format!("common backend {common}");
        return Err(MegatronError::UnknownBackend { backend });
    }
    match &config.sharded {
        sharded if sharded.is("torch_dist") => Ok(ShardedBackend::TorchDist),
        sharded if sharded.is("zarr") => Ok(ShardedBackend::Zarr),
        other => Err(MegatronError::UnknownBackend { backend: format!("sharded backend {other}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::config::Backend;

    #[test]
    fn unknown_backends_and_versions_are_named() {
        for (sharded, common, said) in [
            ("tensorstore", None, "\"tensorstore\" version 1"),
            ("torch_dist", Some("msgpack"), "\"msgpack\" version 1"),
        ] {
            let sharded = Backend::first(sharded);
            let config = CheckpointingConfig { sharded, common: common.map(Backend::first) };
            let error = known_backend(&config).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let mut newer = CheckpointingConfig::torch_dist();
        newer.sharded.version = 2;
        assert!(known_backend(&newer).unwrap_err().to_string().contains("version 2"));
    }
}
