"""Forward and backward are one CUDA graph, launched by one call.

What: the first step runs as usual, and compiles; the second is captured; from then on a step copies its batch into the
graph's input, and replays the graph. All micro-batches are in it. Clipping and the update follow as before.
Why: a step of a small model is hundreds of kernels of a few microseconds each, and Python takes longer to launch a
kernel than the GPU to run it. Without a graph the GPU waits.
Cost: the graph's memory stays reserved between steps, and shapes cannot change. A CPU has no graphs; several processes,
whose steps exchange messages, run as usual, and so do the configs for which the header says why.
Tried: we used `torch.compile`'s own graphs, mode reduce-overhead. They capture the forward and the backward separately,
check their memory in Python at every step, and cannot take micro-batches.
Try: `python profile.py config/reference.py --mode=predict --gpu=H200 --vocab_size=50257
--stages=chunked_loss,cuda_graph`: the same memory, and a tenth less time at the limit, because launches take less.
Source:
- CUDA graphs: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
- Ng et al. 2021, "Accelerating PyTorch with CUDA Graphs":
  https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/
"""

cuda_graph = True
