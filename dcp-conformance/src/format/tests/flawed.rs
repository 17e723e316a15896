//! PyTorch's DCP with one flaw in its format, reader or writer.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, DataSource, ReadReport, SaveSession, WriteReport};
use dcp_core::format::{
    CheckpointAudit, CheckpointFormat, CheckpointTarget, ChunkChecksum, Evidence, Examined,
    Existing, Findings, Folder, FormatInfo, FoundKind, FoundProblem, IndexFacts, Occupant,
    OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RecordAudit, RecordLimits,
    RunSelection, RunTracker, SaveRecord, StoredRecord, UnfinishedSave, WriterOptions,
};
use dcp_core::plan::{GlobalPlan, LoadPlan, ReadItem, ReadKind, SavePlan, WritePlan};
use dcp_core::storage::{OwnThreads, PutMode, StorageExt as _};
use dcp_core::{
    Buffer, CheckpointError, CheckpointMetadata, FormatError, Key, Payload, Storage, StorageError,
    StorageReader, StorageWriter, TensorView, Value,
};
use dcp_formats::dcp::{DcpFormat, DcpReader, DcpWriter};
use dcp_formats::metadata::Profile;
use futures_util::TryStreamExt as _;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Flaw {
    None,
    RecognizesAnything,
    RecognizesPathsOfTheRoot,
    CountsAllFiles,
    ReadsAgain,
    OpensUnread,
    FindsProblems,
    HidesAnEntry,
    ChangesAByte,
    SwapsObjects,
    HidesErrors,
    KeepsALoan,
    ComparesNoChecksums,
    PanicsOnDamage,
    OwnsNothing,
    AuditsProblems,
    ForgesChecksums,
    ComparesNoReads,
    ComparesNoRecords,
    CountsSaves,
    CommitsEarly,
    RemovesTheOldIndex,
    KeepsStaleFiles,
    AbandonsNothing,
    AbandonsAll,
    ReplacesAnything,
    RenamesNothing,
    LeavesAMarker,
    AbandonsAfterTheCommit,
    ClaimsNothing,
    CommitsUnchecked,
    CutsLongItems,
    ComparesNoIndex,
    LetsOthersWrite,
    ForgetsCheckpoints,
    ReplacesWithoutPermission,
}

fn index() -> Key {
    Key::new(".metadata").unwrap()
}

#[derive(Debug)]
pub(super) struct FlawedFormat(pub(super) Flaw);

#[async_trait]
impl CheckpointFormat for FlawedFormat {
    fn info(&self) -> FormatInfo {
        DcpFormat.info()
    }

    fn peeks(&self, folder: &Folder<'_>) -> Vec<Peek> {
        DcpFormat.peeks(folder)
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        let found = DcpFormat.recognize(folder);
        match self.0 {
            Flaw::RecognizesAnything => {
                found.or_else(|| Some(Recognized::new(Evidence::Trace, "is a folder")))
            }
            Flaw::RecognizesPathsOfTheRoot if folder.path() != "." => None,
            Flaw::CountsAllFiles if folder.file_count() > 5 => {
                found.map(|found| found.with_problem(Some("there are too many files".into())))
            }
            _ => found,
        }
    }

    fn recognize_file(&self, name: &str, head: &[u8]) -> bool {
        DcpFormat.recognize_file(name, head)
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        match self.0 {
            Flaw::OpensUnread => Ok(Examined::default()),
            Flaw::FindsProblems => Ok(Examined::new(Some("it is old".into()))),
            _ => DcpFormat.examine(place).await,
        }
    }

    async fn tracker(&self, run: &Place) -> Result<Option<RunTracker>, StorageError> {
        DcpFormat.tracker(run).await
    }

    async fn select(&self, run: &Place) -> Result<Option<RunSelection>, StorageError> {
        DcpFormat.select(run).await
    }

    fn unfinished(
        &self,
        folder: &Folder<'_>,
        metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        DcpFormat.unfinished(folder, metadata)
    }

    fn owns(&self, folder: &Folder<'_>, name: &str) -> bool {
        self.0 != Flaw::OwnsNothing && DcpFormat.owns(folder, name)
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        DcpFormat.occupant(folder).filter(|_| self.0 != Flaw::LetsOthersWrite)
    }

    fn target(&self) -> Option<&dyn CheckpointTarget> {
        Some(self)
    }

    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let storage = place.storage();
        if !matches!(self.0, Flaw::ComparesNoIndex | Flaw::OpensUnread) {
            compare_index(place).await?;
        }
        for _ in 0..if self.0 == Flaw::ReadsAgain { 8 } else { 0 } {
            storage.read_whole(&index(), u64::MAX).await?;
        }
        let verify = !matches!(self.0, Flaw::ComparesNoChecksums | Flaw::ComparesNoReads);
        let reader = DcpReader::builder(Arc::clone(storage)).verify_checksums(verify);
        let reader = FlawedReader { inner: Arc::new(reader.build()), flaw: self.0 };
        if self.0 != Flaw::OpensUnread {
            DcpFormat.open(place, options).await?;
        }
        let audit = FlawedAudit { storage: Arc::clone(storage), flaw: self.0 };
        let opened = OpenedCheckpoint::new(Arc::clone(storage), Arc::new(reader));
        Ok(opened.with_audit(Arc::new(audit)))
    }
}

/// The name of the sidecar has the checksum of the index, and this format has a sidecar.
async fn compare_index(place: &Place) -> Result<(), CheckpointError> {
    let bytes = place.storage().read_whole(&index(), u64::MAX).await?.bytes;
    let sidecar = dcp_formats::dcp::sidecar_of(&bytes)?;
    if !place.listing().objects().iter().any(|meta| meta.key == sidecar) {
        return Err(FormatError::new("index", "its checksum is another one").into());
    }
    Ok(())
}

/// Data of which each item ends, in zeros, after 3000 bytes.
#[derive(Debug)]
struct Cut(Arc<dyn DataSource>);

#[async_trait]
impl DataSource for Cut {
    async fn resolve(
        &self,
        item: usize,
        range: std::ops::Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        let mut bytes = self.0.resolve(item, range.clone()).await?.to_bytes().to_vec();
        let zeros = (range.start..).zip(&mut bytes).filter(|(at, _)| *at >= 3000);
        zeros.for_each(|(_, byte)| *byte = 0);
        Ok(bytes.into())
    }

    fn segment_bytes(&self) -> u64 {
        self.0.segment_bytes()
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

impl CheckpointTarget for FlawedFormat {
    fn parts(&self) -> &'static [&'static str] {
        CheckpointTarget::parts(&DcpFormat)
    }

    fn existing(&self, folder: &Folder<'_>, metadata: Option<&CheckpointMetadata>) -> Existing {
        match self.0 {
            Flaw::ForgetsCheckpoints => Existing::Nothing,
            _ => DcpFormat.existing(folder, metadata),
        }
    }

    fn compresses(&self) -> bool {
        DcpFormat.compresses()
    }

    fn writer(
        &self,
        storage: Arc<dyn Storage>,
        options: &WriterOptions,
    ) -> Result<Arc<dyn StorageWriter>, CheckpointError> {
        let replaces = options.overwrite || self.0 == Flaw::ReplacesWithoutPermission;
        DcpFormat.writer(storage, &options.clone().with_overwrite(replaces))
    }
}

/// Has the mark of the first archive as a record.
#[derive(Debug)]
struct FlawedAudit {
    storage: Arc<dyn Storage>,
    flaw: Flaw,
}

#[async_trait]
impl CheckpointAudit for FlawedAudit {
    async fn findings(&self) -> Result<Findings, CheckpointError> {
        let problem = FoundProblem::new(FoundKind::Index, "it is old");
        let problems = (self.flaw == Flaw::AuditsProblems).then_some(problem);
        Ok(Findings::new(problems.into_iter().collect(), Vec::new()))
    }

    async fn checksum(
        &self,
        _: &Arc<CheckpointMetadata>,
        _: usize,
        _: usize,
    ) -> Result<ChunkChecksum, CheckpointError> {
        Ok(match self.flaw {
            Flaw::ForgesChecksums => ChunkChecksum::Crc32(7),
            // Small archives are always read, and compared, as a whole.
            _ => ChunkChecksum::EveryRead,
        })
    }

    async fn index_facts(&self) -> Result<IndexFacts, CheckpointError> {
        Ok(IndexFacts::default())
    }

    async fn save_record(&self, _: &[bool]) -> Result<Option<SaveRecord>, CheckpointError> {
        Ok(None)
    }

    fn records(&self) -> Option<&dyn RecordAudit> {
        Some(self)
    }
}

#[async_trait]
impl RecordAudit for FlawedAudit {
    async fn records(&self) -> Result<Vec<StoredRecord>, CheckpointError> {
        let file = Key::new("__0_0.distcp").unwrap();
        Ok(vec![StoredRecord::new("the mark", file, 0..4)])
    }

    async fn check_record(
        &self,
        record: &StoredRecord,
        _: RecordLimits<'_>,
    ) -> Result<(), CheckpointError> {
        let bytes = self.storage.read_range(&record.file, record.bytes.clone()).await?;
        if bytes != b"PK\x03\x04"[..] && self.flaw != Flaw::ComparesNoRecords {
            return Err(FormatError::new("archive", "its mark is another one").into());
        }
        Ok(())
    }

    async fn check_structure(&self) -> Result<Vec<FoundProblem>, CheckpointError> {
        Ok(Vec::new())
    }
}

#[derive(Debug)]
struct FlawedReader {
    inner: Arc<DcpReader>,
    flaw: Flaw,
}

#[async_trait]
impl StorageReader for FlawedReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        let metadata = match self.inner.metadata().await {
            Err(error) if self.flaw == Flaw::PanicsOnDamage => panic!("{error}"),
            metadata => metadata?,
        };
        if self.flaw == Flaw::HidesAnEntry {
            let mut rest = CheckpointMetadata::clone(&metadata);
            rest.retain(|fqn, _| fqn != "columns");
            return Ok(Arc::new(rest));
        }
        Ok(metadata)
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let flaw = self.flaw;
        let sink = Arc::new(FlawedSink { inner: sink, flaw, kept: Mutex::default() });
        match self.inner.read(metadata, plan, Arc::clone(&sink) as _).await {
            Err(_) if flaw == Flaw::HidesErrors => Ok(ReadReport::default()),
            Err(error) if flaw == Flaw::PanicsOnDamage => panic!("{error}"),
            read => {
                std::mem::forget(std::mem::take(&mut *sink.kept.lock().unwrap()));
                read
            }
        }
    }
}

#[derive(Debug)]
struct FlawedSink {
    inner: Arc<dyn DataSink>,
    flaw: Flaw,
    kept: Mutex<Vec<Buffer>>,
}

impl DataSink for FlawedSink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        self.inner.destination(item)
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        let view = self.inner.destination(item)?;
        let run = view.runs().next();
        if let (Some(run), ReadKind::Tensor { .. }) = (run, &item.kind) {
            let mut lent = view.memory().lend(run).unwrap();
            match self.flaw {
                Flaw::ChangesAByte => lent[0] ^= 1,
                Flaw::KeepsALoan => self.kept.lock().unwrap().push(lent),
                _ => {}
            }
        }
        self.inner.commit(item)
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        let value = if self.flaw == Flaw::SwapsObjects { Value::None } else { value };
        self.inner.object(item, value)
    }
}

pub(super) struct FlawedWriter {
    inner: DcpWriter,
    storage: Arc<dyn Storage>,
    flaw: Flaw,
    plans: Mutex<Vec<WritePlan>>,
}

impl FlawedWriter {
    pub(super) fn new(flaw: Flaw, storage: Arc<dyn Storage>, overwrite: bool) -> Self {
        let overwrite = overwrite || flaw == Flaw::ReplacesAnything;
        let inner = DcpWriter::builder(Arc::clone(&storage)).overwrite(overwrite).build();
        Self { inner, storage, flaw, plans: Mutex::default() }
    }

    async fn put(&self, name: &str, text: String) -> Result<(), CheckpointError> {
        let key = Key::new(name).unwrap();
        self.storage.put(&key, text.into_bytes().into(), PutMode::Overwrite).await?;
        Ok(())
    }
}

impl fmt::Debug for FlawedWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FlawedWriter").field(&self.flaw).finish()
    }
}

#[async_trait]
impl StorageWriter for FlawedWriter {
    fn encode_object(&self, fqn: &str, value: &Value) -> Result<Bytes, CheckpointError> {
        self.inner.encode_object(fqn, value)
    }

    async fn begin(&self) -> Result<SaveSession, CheckpointError> {
        let mut session = self.inner.begin().await?;
        match self.flaw {
            Flaw::LeavesAMarker => self.put("saving", String::new()).await?,
            Flaw::RemovesTheOldIndex => self.storage.delete(&[index()]).await?,
            Flaw::KeepsStaleFiles => session.stale.clear(),
            Flaw::ClaimsNothing | Flaw::CommitsUnchecked => {
                return Ok(SaveSession::new(session.generation, session.stale.clone()));
            }
            _ => {}
        }
        Ok(session)
    }

    fn place(
        &self,
        session: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError> {
        let plans = self.inner.place(session, locals, global)?;
        self.plans.lock().unwrap().clone_from(&plans);
        Ok(plans)
    }

    fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError> {
        if self.flaw == Flaw::RenamesNothing {
            return Ok(file.clone());
        }
        self.inner.renamed(file, generation)
    }

    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError> {
        let data = match self.flaw {
            Flaw::CutsLongItems => Arc::new(Cut(data)),
            _ => data,
        };
        let report = self.inner.write(local, plan, data).await?;
        if self.flaw == Flaw::CommitsEarly {
            self.put(".metadata", String::new()).await?;
        }
        Ok(report)
    }

    async fn commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError> {
        if self.flaw == Flaw::CommitsUnchecked {
            let bytes = dcp_formats::metadata::encode(metadata, Profile::Compat)?;
            self.storage.put(&index(), bytes.into(), PutMode::Overwrite).await?;
            return Ok(());
        }
        static SAVES: AtomicU64 = AtomicU64::new(0);
        if self.flaw == Flaw::CountsSaves {
            self.put("saves", SAVES.fetch_add(1, Ordering::SeqCst).to_string()).await?;
        }
        let committed = self.inner.commit(session, metadata, reports).await;
        if self.flaw == Flaw::AbandonsAfterTheCommit && committed.is_err() {
            let plans = self.plans.lock().unwrap().clone();
            for file in plans.iter().flat_map(|plan| &plan.files) {
                let _ = self.storage.delete(std::slice::from_ref(file)).await;
            }
        }
        committed
    }

    async fn abandon(&self, plan: &WritePlan) {
        match self.flaw {
            Flaw::AbandonsNothing => {}
            Flaw::AbandonsAll => {
                let all = self.storage.list(None).try_collect::<Vec<_>>().await.unwrap();
                for meta in all {
                    let _ = self.storage.delete(&[meta.key]).await;
                }
            }
            _ => self.inner.abandon(plan).await,
        }
    }
}
