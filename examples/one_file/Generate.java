// Generates from what `tformer export RUN --layout one-file --out FOLDER` writes; needs onnxruntime.jar, from Maven's
// com.microsoft.onnxruntime:onnxruntime. java -cp onnxruntime.jar Generate.java FOLDER/generate.onnx BEAMS ID...
// It prints the best output's ids. The source's ids include its end token.
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;

class Generate {
  public static void main(String[] arguments) throws OrtException {
    int beams = Integer.parseInt(arguments[1]);
    int[] source = Arrays.stream(arguments).skip(2).mapToInt(Integer::parseInt).toArray();
    Map<String, Object> values = Map.ofEntries(
        Map.entry("src_ids", new int[][] {source}),
        Map.entry("src_lengths", new int[] {source.length}),
        Map.entry("beams", new int[] {beams}),
        Map.entry("n_best", new int[] {1}),
        Map.entry("max_tokens", new int[] {256}),
        Map.entry("min_tokens", new int[] {0}),
        Map.entry("length_penalty", new double[] {1}),
        Map.entry("repetition_penalty", new float[] {1}),
        Map.entry("no_repeat_ngram", new int[] {0}),
        Map.entry("suppress", new int[] {-1}),
        Map.entry("bad_words", new int[][] {{-1}}),
        Map.entry("first_ids", new int[][] {{-1}}));
    OrtEnvironment environment = OrtEnvironment.getEnvironment();
    try (OrtSession session = environment.createSession(arguments[0])) {
      Map<String, OnnxTensor> feed = new HashMap<>();
      for (Map.Entry<String, Object> each : values.entrySet())
        feed.put(each.getKey(), OnnxTensor.createTensor(environment, each.getValue()));
      try (OrtSession.Result found = session.run(feed, Set.of("ids", "lengths"))) {
        int[] ids = ((int[][][]) found.get("ids").get().getValue())[0][0];
        int length = ((int[][]) found.get("lengths").get().getValue())[0][0];
        System.out.println(
            Arrays.stream(ids, 0, length).mapToObj(String::valueOf).collect(Collectors.joining(" ")));
      }
    }
  }
}
