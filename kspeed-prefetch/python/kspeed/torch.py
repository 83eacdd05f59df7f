"""PyTorch samplers that tell their order. Needs torch."""

from torch.utils.data import DistributedSampler as _DistributedSampler

from ._hints import hint


def files_of(dataset):
    """The paths of a dataset's samples, or ``None``: ``ImageFolder`` and others
    with ``samples`` or ``imgs`` (path, class), or ``files``; a ``Subset`` of one.
    """
    indices = getattr(dataset, "indices", None)
    if indices is not None and hasattr(dataset, "dataset"):
        files = files_of(dataset.dataset)
        return None if files is None else [files[i] for i in indices]
    for name in ("samples", "imgs"):
        samples = getattr(dataset, name, None)
        if samples:
            return [s[0] if isinstance(s, (tuple, list)) else s for s in samples]
    return getattr(dataset, "files", None)


class DistributedSampler(_DistributedSampler):
    """``torch.utils.data.DistributedSampler`` that tells KSpeed its order when an
    epoch begins. ``files``: the paths of the samples, if the dataset does not have
    them where ``files_of`` looks."""

    def __init__(self, dataset, *args, files=None, **kwargs):
        super().__init__(dataset, *args, **kwargs)
        self._files = files if files is not None else files_of(dataset)
        self._told = None

    def __iter__(self):
        # Iterating seeds a generator of its own: it may be done twice.
        if self._files is not None and self._told != self.epoch:
            self._told = self.epoch
            hint(self._files, list(super().__iter__()), name=f"rank-{self.rank}")
        return super().__iter__()
