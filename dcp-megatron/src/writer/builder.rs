//! Options of a [`MegatronWriter`].

use std::fmt;
use std::sync::Arc;

use dcp_core::format::Compression;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Key, Storage, Value};
use dcp_formats::ByteProgress;
use dcp_formats::dcp::{DcpWriterBuilder, FileLayout};
use dcp_formats::metadata::Profile;

use super::form::METADATA_JSON;
use super::{MegatronForm, MegatronWriter};

/// Options of a [`MegatronWriter`].
#[must_use = "call `build`"]
pub struct MegatronWriterBuilder {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) dcp: DcpWriterBuilder,
    pub(super) common: Option<Value>,
    pub(super) form: MegatronForm,
    pub(super) profile: Profile,
    pub(super) integrity: bool,
    pub(super) overwrite: bool,
}

impl MegatronWriterBuilder {
    /// The common state: everything that is not sharded, a dict. Only the coordinator's counts.
    pub fn common(mut self, common: impl Into<Value>) -> Self {
        self.common = Some(common.into());
        self
    }

    pub(crate) fn has_common(&self) -> bool {
        self.common.is_some()
    }

    /// Whether the common state goes into a `common.pt`.
    pub(crate) fn has_common_file(&self) -> bool {
        self.form == MegatronForm::CommonFile
    }

    pub(crate) fn common_value(&self) -> Option<&Value> {
        self.common.as_ref()
    }

    pub(crate) fn common_dict(&self) -> Option<&Dict> {
        self.common.as_ref()?.view().as_dict()
    }

    /// The bytes of parts in flight to the storage; see
    /// [`DcpWriterBuilder::upload_bytes`](dcp_formats::dcp::DcpWriterBuilder::upload_bytes).
    pub fn upload_bytes(mut self, bytes: u64) -> Self {
        self.dcp = self.dcp.upload_bytes(bytes);
        self
    }

    /// Sets the place of the common state, and so the versions of Megatron-Core that read the
    /// checkpoint.
    pub fn form(mut self, form: MegatronForm) -> Self {
        self.form = form;
        self
    }

    /// Whether `integrity.json` is written (Megatron-Core 0.17.1 and later verify it on request);
    /// off by default, because every rank reads the files that it wrote once more for it.
    pub fn integrity(mut self, integrity: bool) -> Self {
        self.integrity = integrity;
        self
    }

    /// Whether an existing checkpoint is replaced, or an error (the default).
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Sets the number of files of each rank; one by default, as Megatron-Core since 0.17.
    /// [`FileLayout::MegatronCompatible`] divides as its `thread_count` does.
    pub fn files(mut self, layout: FileLayout) -> Self {
        self.dcp = self.dcp.files(layout);
        self
    }

    /// The form of the `.metadata` pickle; by default the one that all versions read, with five
    /// properties for each tensor.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }

    /// Compresses tensors and objects, if there is a compression; not the common state. PyTorch 2.7
    /// and later load it.
    ///
    /// # Errors
    ///
    /// As [`DcpWriterBuilder::compression`](dcp_formats::dcp::DcpWriterBuilder::compression).
    pub fn compression(
        mut self,
        compression: impl Into<Option<Compression>>,
    ) -> Result<Self, CheckpointError> {
        self.dcp = self.dcp.compression(compression)?;
        Ok(self)
    }

    /// Reports the bytes written.
    pub fn progress(mut self, progress: ByteProgress) -> Self {
        self.dcp = self.dcp.progress(progress);
        self
    }

    /// The writer.
    #[must_use]
    pub fn build(self) -> MegatronWriter {
        let mut dcp = self.dcp.profile(self.profile).overwrite(self.overwrite);
        if let Ok(last) = Key::new(METADATA_JSON) {
            dcp = dcp.completed_by(last);
        }
        MegatronWriter {
            dcp: dcp.build(),
            storage: self.storage,
            common: self.common,
            form: self.form,
            profile: self.profile,
            integrity: self.integrity,
            overwrite: self.overwrite,
        }
    }
}

impl fmt::Debug for MegatronWriterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MegatronWriterBuilder")
            .field("storage", &self.storage)
            .field("form", &self.form)
            .field("integrity", &self.integrity)
            .field("overwrite", &self.overwrite)
            .finish_non_exhaustive()
    }
}
